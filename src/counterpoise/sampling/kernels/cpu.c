/* Decode steps in float32 on a CPU; cpu.py builds this and calls it from several threads, each with rows of its own.

   A call takes some rows through all layers, and through several steps, so that what it works on stays in the caches of one core.
   Every number is summed in an order of its own: neither the threads nor the other rows change a bit of a row. Sums are written in
   vectors, because a compiler that keeps to IEEE may not reorder them; infinities and NaN go through as in torch.

   Axes: B slots, R slots of a call, L cache slots, J = H + 2 K heads of a fused projection, H query heads, K key-value heads, C head
   size, D hidden size, F MLP width, V vocabulary, N rollouts, T response tokens. A matmul has K terms a sum and N columns. */

#include "vectors.h"

enum { PANEL = 16, PARTS = PANEL / LANES }; /* columns of a tile of a matmul: weights lie [N / PANEL, K, PANEL] */
enum { ROWS = 24 };                         /* R at most: a multiple of TILE; more do not fit into the caches */
const whole rows_of_tile = TILE, rows_of_call = ROWS;
enum { KEYS_BLOCK = 64, DRAW_BLOCK = 64 };  /* cache slots, tokens looked at at a time: multiples of LANES */
enum { LINE = 16 };                         /* floats the memory gives at once */

typedef struct { /* matmul weights in panels; NULL where the model has none */
    const float *qkv, *qkv_bias, *out, *out_bias, *gate_up, *gate_up_bias, *down, *down_bias;
    const float *input_norm, *middle_norm, *query_norm, *key_norm;
} Layer;

typedef struct {
    const Layer *layers;
    const float *embed_VD, *norm_D, *head, *cos_LC, *sin_LC;
    float *keys, *values; /* [layers, B, K, L, C] */
    whole num_layers, H, K, C, D, F, V, B, L;
    float eps, scaling;
} Model;

typedef struct {
    whole *token_B, *position_B, *age_B, *row_B;
    uint8_t *alive_B;
} Slots;

typedef struct { /* [N + 1, T]; hidden_NTD, given_NT, limit_N are NULL, K is 0 where nobody asked for them */
    whole *token_ids_NT, *length_N;
    float *logp_NT, *entropy_NT, *hidden_NTD;
    const double *uniform_NT;
    const whole *stops;
    whole *topk_ids_NTK;
    float *topk_logp_NTK;
    const whole *given_NT, *limit_N; /* tokens that are not drawn (-1: drawn); where a turn ends at the latest */
    whole num_stops, T, nowhere, K; /* nowhere: the row of slots without a rollout */
    float inverse;               /* 1 / temperature */
    int is_greedy;
} Columns;

/* out = weight * x / sqrt(mean x^2 + eps) */
INLINE void normed(const float *restrict x, const float *restrict weight, float *restrict out, float eps, whole size) {
    const float scale = 1.0f / sqrtf(square_sum(x, size) / (float)size + eps);
    for (whole d = 0; d < size; d++) out[d] = weight[d] * (x[d] * scale);
}

/* PANEL sums of a row to their place */
INLINE void put(float *to, const vec *sum, const float *bias, int is_added) {
    for (int p = 0; p < PARTS; p++) {
        const vec y = bias ? sum[p] + load(bias + p * LANES) : sum[p];
        store(to + p * LANES, is_added ? load(to + p * LANES) + y : y);
    }
}

/* The same where the panel, and the bias with it, reach beyond the last column */
INLINE void put_some(float *to, const vec *sum, const float *bias, int is_added, whole cols) {
    float row[PANEL] = {0};
    memcpy(row, to, is_added ? cols * sizeof(float) : 0);
    put(row, sum, bias, is_added);
    memcpy(to, row, cols * sizeof(float));
}

/* rows x cols of out (+)= x panel + bias; k runs in order whatever the number of rows. */
INLINE void tile(const float *restrict x, const float *restrict panel, const float *restrict bias, float *restrict out, whole K,
                 whole N, whole cols, int is_added, const int rows) {
    vec sum[TILE][PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) sum[r][p] = all(0);
#pragma GCC unroll 4
    for (whole k = 0; k < K; k++) {
        vec part[PARTS];
        for (int p = 0; p < PARTS; p++) part[p] = load(panel + k * PANEL + p * LANES);
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < PARTS; p++) sum[r][p] += x[r * K + k] * part[p];
    }
    if (cols == PANEL)
        for (int r = 0; r < rows; r++) put(out + r * N, sum[r], bias, is_added);
    else
        for (int r = 0; r < rows; r++) put_some(out + r * N, sum[r], bias, is_added, cols);
}

static void matmul(const float *x, const float *w, const float *bias, float *out, whole R, whole K, whole N, int is_added) {
    for (whole n = 0; n < N; n += PANEL) {
        const whole cols = N - n < PANEL ? N - n : PANEL;
        const float *shift = bias ? bias + n : bias;
        whole r = 0;
        for (; r + TILE <= R; r += TILE) tile(x + r * K, w + n * K, shift, out + r * N + n, K, N, cols, is_added, TILE);
        for (; r < R; r++) tile(x + r * K, w + n * K, shift, out + r * N + n, K, N, cols, is_added, 1);
    }
}

/* One head: its norm where there is one, then (a, b) -> (a cos - b sin, b cos + a sin) of its two halves. */
INLINE void rotated(const float *restrict x, const float *restrict norm, const float *restrict cos, const float *restrict sin,
                    float *restrict out, float eps, whole C) {
    const whole half = C / 2;
    if (!norm) {
        for (whole c = 0; c < half; c++) {
            out[c] = x[c] * cos[c] - x[c + half] * sin[c];
            out[c + half] = x[c + half] * cos[c + half] + x[c] * sin[c + half];
        }
        return;
    }
    const float scale = 1.0f / sqrtf(square_sum(x, C) / (float)C + eps);
    for (whole c = 0; c < half; c++) {
        const float a = norm[c] * (x[c] * scale), b = norm[c + half] * (x[c + half] * scale);
        out[c] = a * cos[c] - b * sin[c];
        out[c + half] = b * cos[c + half] + a * sin[c + half];
    }
}

/* score[l] = q . k_l * scaling; four keys at a time share the loads of q and the sums over lanes. What is read next is fetched
   meanwhile. */
INLINE void scores(const float *q, const float *k, float *score, whole size, whole C, float scaling, const float *soon) {
    whole l = 0;
    for (; C % LANES == 0 && l + 4 <= size; l += 4) {
        for (whole c = 0; c < 4 * C; c += LINE) __builtin_prefetch(soon + l * C + c);
        vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        for (whole c = 0; c < C; c += LANES) {
            const vec part = load(q + c);
            s0 += part * load(k + l * C + c);
            s1 += part * load(k + (l + 1) * C + c);
            s2 += part * load(k + (l + 2) * C + c);
            s3 += part * load(k + (l + 3) * C + c);
        }
        const v4 four = pair_sums(pair_sums(halved(s0), halved(s1)), pair_sums(halved(s2), halved(s3))) * scaling;
        memcpy(score + l, &four, sizeof four);
    }
    for (; l < size; l++) score[l] = dot(q, k + l * C, C) * scaling;
}

/* out[c] = out[c] * fade + sum_l share[l] v[l, c] for num vectors of c */
INLINE void mix(const float *share, const float *v, float *out, float fade, whole size, whole C, const int num, const float *soon) {
    vec sum[WIDE];
    for (int i = 0; i < num; i++) sum[i] = load(out + i * LANES) * fade;
    for (whole l = 0; l < size; l++) {
        for (int c = 0; c < num * LANES; c += LINE) __builtin_prefetch(soon + l * C + c);
        for (int i = 0; i < num; i++) sum[i] += share[l] * load(v + l * C + i * LANES);
    }
    for (int i = 0; i < num; i++) store(out + i * LANES, sum[i]);
}

/* share[l] = exp(score[l] - top) in place up to a whole number of vectors; their sum */
INLINE float shares(float *share, whole end, float top) {
    vec sum = {0};
    for (whole l = 0; l < end; l += LANES) {
        const vec part = exp_of(load(share + l) - top);
        store(share + l, part);
        sum += part;
    }
    return sum_of(sum);
}

INLINE float highest(const float *x, whole end, float top) {
    vec high = all(top);
    for (whole l = 0; l < end; l += LANES) high = chosen(load(x + l) > high, load(x + l), high);
    return max_of(high);
}

/* Softmax attention of one query over num_seen keys, a block at a time; earlier sums fade by exp(earlier top - new top).
   num vectors of values are summed at once: a constant, as is C, so that sums stay in registers. */
INLINE void attend_head(const float *restrict q, const float *restrict keys, const float *restrict values, float *restrict out,
                        whole num_seen, float scaling, const float *next_keys, const whole C, const int num) {
    float share[KEYS_BLOCK], top = -INFINITY, total = 0;
    const whole whole_vectors = C - C % (num * LANES);
    for (whole c = 0; c < C; c++) out[c] = 0;
    for (whole start = 0; start < num_seen; start += KEYS_BLOCK) {
        const whole size = num_seen - start < KEYS_BLOCK ? num_seen - start : KEYS_BLOCK, end = (size + LANES - 1) / LANES * LANES;
        const float *k = keys + start * C, *v = values + start * C;
        const float *soon = start + KEYS_BLOCK < num_seen ? k + KEYS_BLOCK * C : next_keys;
        scores(q, k, share, size, C, scaling, v);
        for (whole l = size; l < end; l++) share[l] = -INFINITY;
        const float higher = highest(share, end, top), fade = exp_of(all(top - higher))[0];
        total = total * fade + shares(share, end, higher);
        top = higher;
        for (whole c = 0; c < whole_vectors; c += num * LANES) mix(share, v + c, out + c, fade, size, C, num, soon + c);
        for (whole c = whole_vectors; c < C; c++) {
            out[c] *= fade;
            for (whole l = 0; l < size; l++) out[c] += share[l] * v[l * C + c];
        }
    }
    for (whole c = 0; c < C; c++) out[c] /= total;
}

#define HEAD(SIZE)                                                                                              \
    case SIZE:                                                                                                  \
        attend_head(q, keys, values, out, num_seen, scaling, next, SIZE, SIZE / LANES / (1 + (SIZE / LANES > WIDE))); \
        break;

static void attend(const float *q, const float *keys, const float *values, float *out, whole num_seen, float scaling,
                   const float *next, whole C) {
    switch (C) {
        HEAD(16) HEAD(24) HEAD(32) HEAD(48) HEAD(64) HEAD(80) HEAD(96) HEAD(128)
        default: attend_head(q, keys, values, out, num_seen, scaling, next, C, 1);
    }
}

/* One row's heads: keys (rotated) and values go into the cache at its position, queries look at the cache up to there. */
static void mixed(const Model *m, const Layer *layer, whole number, whole slot, whole position, float *qkv_JC, float *out_HC) {
    const whole H = m->H, K = m->K, C = m->C, room = m->L * C, base = (number * m->B + slot) * K * room;
    const float *cos = m->cos_LC + position * C, *sin = m->sin_LC + position * C;
    float *keys = m->keys + base, *values = m->values + base;
    for (whole k = 0; k < K; k++) {
        rotated(qkv_JC + (H + k) * C, layer->key_norm, cos, sin, keys + k * room + position * C, m->eps, C);
        memcpy(values + k * room + position * C, qkv_JC + (H + K + k) * C, C * sizeof(float));
    }
    float *q_C = qkv_JC + H * C; /* the keys are in the cache: their place is free */
    for (whole h = 0; h < H; h++) {
        const whole at = h / (H / K) * room;
        rotated(qkv_JC + h * C, layer->query_norm, cos, sin, q_C, m->eps, C);
        attend(q_C, keys + at, values + at, out_HC + h * C, position + 1, m->scaling, keys + at + room, C);
    }
}

/* silu(gate) * up of [gate, up], at its start */
INLINE void gated(float *gate_up, whole F) {
    whole f = 0;
    for (; f + LANES <= F; f += LANES) store(gate_up + f, silu_times(load(gate_up + f), load(gate_up + F + f)));
    if (f < F) {
        const vec rest = silu_times(some(gate_up + f, F - f, 0), some(gate_up + F + f, F - f, 0));
        memcpy(gate_up + f, &rest, (F - f) * sizeof(float));
    }
}

INLINE whole larger(whole a, whole b) { return a > b ? a : b; }

/* Floats a call needs beside its own: x, a normed or mixed copy, and the widest of what is computed from it. */
static whole width_of(const Model *m) { return larger(larger((m->H + 2 * m->K) * m->C, 2 * m->F), m->V); }
whole scratch_size(const Model *m) { return ROWS * (m->D + larger(m->D, m->H * m->C) + width_of(m)); }

/* R rows through all layers; the final normed hidden states [R, D], which lie in scratch. */
static float *forward(const Model *m, const Slots *s, const whole *slot_R, whole R, float *scratch) {
    const whole D = m->D, F = m->F, HC = m->H * m->C, JC = (m->H + 2 * m->K) * m->C;
    float *x = scratch, *copy = x + ROWS * D, *wide = copy + ROWS * larger(D, HC);
    for (whole r = 0; r < R; r++) memcpy(x + r * D, m->embed_VD + s->token_B[slot_R[r]] * D, D * sizeof(float));
    for (whole number = 0; number < m->num_layers; number++) {
        const Layer *layer = m->layers + number;
        for (whole r = 0; r < R; r++) normed(x + r * D, layer->input_norm, copy + r * D, m->eps, D);
        matmul(copy, layer->qkv, layer->qkv_bias, wide, R, D, JC, 0);
        for (whole r = 0; r < R; r++) mixed(m, layer, number, slot_R[r], s->position_B[slot_R[r]], wide + r * JC, copy + r * HC);
        matmul(copy, layer->out, layer->out_bias, x, R, HC, D, 1);
        for (whole r = 0; r < R; r++) normed(x + r * D, layer->middle_norm, copy + r * D, m->eps, D);
        matmul(copy, layer->gate_up, layer->gate_up_bias, wide, R, D, 2 * F, 0);
        for (whole r = 0; r < R; r++) gated(wide + r * 2 * F, F);
        for (whole r = 1; r < R; r++) memmove(wide + r * F, wide + r * 2 * F, F * sizeof(float));
        matmul(wide, layer->down, layer->down_bias, x, R, F, D, 1);
    }
    for (whole r = 0; r < R; r++) normed(x + r * D, m->norm_D, copy + r * D, m->eps, D);
    return copy;
}

/* mass[v] = exp((z[v] - top) / T) for up to DRAW_BLOCK tokens, 0 after them; their sum, and adds sum mass (z - top) / T to tilt.
   The difference comes first: it is 0 for the likeliest token, and so no log-prob is above 0 and no entropy under it. */
INLINE float masses(const float *z, float *mass, whole size, float inverse, float top, double *tilt) {
    vec sum = {0}, tilted = {0};
    for (whole v = 0; v < size; v += LANES) {
        const vec x = size - v >= LANES ? load(z + v) : some(z + v, size - v, -INFINITY), below = (x - top) * inverse;
        const vec part = exp_of(below);
        store(mass + v, part);
        sum += part;
        tilted += part * chosen(below < all(-87.0f), all(-87.0f), below); /* no 0 * inf where a token is ruled out */
    }
    *tilt += (double)sum_of(tilted);
    return sum_of(sum);
}

/* The first token at which the cumulative mass passes the target: the block that holds it, then the token in the block. */
INLINE whole token_at(const float *z, whole V, float inverse, float top, double target) {
    float mass[DRAW_BLOCK];
    double reached = 0, unused = 0;
    for (whole start = 0; start < V; start += DRAW_BLOCK) {
        const whole size = V - start < DRAW_BLOCK ? V - start : DRAW_BLOCK;
        const double sum = masses(z + start, mass, size, inverse, top, &unused);
        if (reached + sum > target) {
            whole last = 0;
            for (whole v = 0; v < size; v++) {
                if (mass[v] > 0) last = v;
                if ((reached += mass[v]) > target) break;
            }
            return start + last; /* rounding may leave the target beyond the block: then its last token that has mass */
        }
        reached += sum;
    }
    return V - 1; /* logits that are not finite */
}

INLINE float top_of(const float *z, whole V) {
    const whole in_vectors = V - V % LANES;
    float top = highest(z, in_vectors, -INFINITY);
    for (whole v = in_vectors; v < V; v++) top = z[v] > top ? z[v] : top;
    return top;
}

/* The K likeliest tokens, largest first and of equal ones the first, with their logits. */
static void candidates(const float *z, whole V, whole K, whole *ids, float *best) {
    for (whole v = 0, num = 0; v < V; v++) {
        if (num == K && !(z[v] > best[K - 1])) continue;
        whole k = num < K ? num++ : K - 1;
        for (; k > 0 && z[v] > best[k - 1]; k--) best[k] = best[k - 1], ids[k] = ids[k - 1];
        best[k] = z[v], ids[k] = v;
    }
}

/* A token from softmax(z / T), or the likeliest one; its log-prob, the distribution's entropy, and K candidates with their log-probs. */
static whole drawn(const float *z, double uniform, whole V, float inverse, int is_greedy, float *logp, float *entropy, whole K, whole *ids,
                   float *best) {
    float mass[DRAW_BLOCK];
    const float top = top_of(z, V);
    double total = 0, tilt = 0;
    for (whole v = 0; v < V; v += DRAW_BLOCK)
        total += masses(z + v, mass, V - v < DRAW_BLOCK ? V - v : DRAW_BLOCK, inverse, top, &tilt);
    whole token = 0;
    if (is_greedy)
        while (token < V - 1 && !(z[token] >= top)) token++;
    else
        token = token_at(z, V, inverse, top, uniform * total);
    *logp = (float)((double)((z[token] - top) * inverse) - log(total));
    *entropy = (float)(log(total) - tilt / total);
    if (K) candidates(z, V, K, ids, best);
    for (whole k = 0; k < K; k++) best[k] = (float)((double)((best[k] - top) * inverse) - log(total));
    return token;
}

void draw(const float *logits_BV, const double *uniform_B, float inverse, whole *token_B, float *logp_B, float *entropy_B, whole B,
          whole V) {
    for (whole b = 0; b < B; b++) token_B[b] = drawn(logits_BV + b * V, uniform_B[b], V, inverse, 0, logp_B + b, entropy_B + b, 0, 0, 0);
}

/* A drawn or given token into its column; the slot moves on, or ends at a drawn stop or at its limit. */
INLINE void record(const Slots *s, const Columns *c, whole b, const float *z, whole V, const float *hidden, whole D) {
    const whole at = s->row_B[b] * c->T + s->age_B[b];
    const double uniform = c->is_greedy ? 0 : c->uniform_NT[at];
    const whole given = c->given_NT ? c->given_NT[at] : -1;
    const whole token = given >= 0 ? given
                                   : drawn(z, uniform, V, c->inverse, c->is_greedy, c->logp_NT + at, c->entropy_NT + at, c->K,
                                           c->topk_ids_NTK + at * c->K, c->topk_logp_NTK + at * c->K);
    if (c->hidden_NTD) memcpy(c->hidden_NTD + at * D, hidden, D * sizeof(float));
    c->token_ids_NT[at] = s->token_B[b] = token;
    c->length_N[s->row_B[b]] = s->age_B[b] + 1;
    int is_over = s->age_B[b] + 1 >= (c->limit_N ? c->limit_N[s->row_B[b]] : c->T);
    for (whole i = 0; i < c->num_stops; i++) is_over |= given < 0 && c->stops[i] == token;
    if (is_over) {
        s->alive_B[b] = 0;
        s->row_B[b] = c->nowhere;
    } else {
        s->age_B[b]++;
        s->position_B[b]++;
    }
}

/* One token for R slots: final hidden states and logits. */
void decode(const Model *m, const Slots *s, const whole *slot_R, whole R, float *hidden_RD, float *logits_RV, float *scratch) {
    memcpy(hidden_RD, forward(m, s, slot_R, R, scratch), R * m->D * sizeof(float));
    matmul(hidden_RD, m->head, 0, logits_RV, R, m->D, m->V, 0);
}

/* Up to num_steps tokens for R living slots; one that ends leaves the rest at once. */
void advance(const Model *m, const Slots *s, const Columns *c, const whole *slot_R, whole R, whole num_steps, float *scratch) {
    whole left_R[ROWS];
    memcpy(left_R, slot_R, R * sizeof(whole));
    float *logits = scratch + scratch_size(m) - ROWS * width_of(m);
    for (whole step = 0; step < num_steps && R; step++) {
        const float *hidden = forward(m, s, left_R, R, scratch);
        matmul(hidden, m->head, 0, logits, R, m->D, m->V, 0);
        whole num_left = 0;
        for (whole r = 0; r < R; r++) {
            record(s, c, left_R[r], logits + r * m->V, m->V, hidden + r * m->D, m->D);
            if (s->alive_B[left_R[r]]) left_R[num_left++] = left_R[r];
        }
        R = num_left;
    }
}
