/* What lies between the products of a decoder layer, forward and backward, in float32 on a CPU; cpu.py and cpu_attention.py call it.

   A call works on a range of rows or heads, and every number is summed in an order of its own, so that threads change no bit.
   Only the gradient of a norm's weight is a sum over a call's rows.

   Axes: R rows (tokens, or heads of tokens), D normed size, F MLP width; L flat tokens, P prompts of W tokens, then N responses of
   S tokens; H query heads, K key-value heads, J = H + 2 K, C head size. */

#include <stdlib.h>

#include "vectors.h"

enum { BLOCK = 8 * TILE }; /* queries that the backward of attention takes at a time */
#if defined(__AVX512VL__)
enum { PARTS = 3 }; /* vectors of a row of a tile: TILE x PARTS sums stay in registers */
#elif defined(__AVX__)
enum { PARTS = 2 };
#else
enum { PARTS = 4 };
#endif

INLINE whole least(whole a, whole b) { return a < b ? a : b; }
INLINE whole in_vectors(whole size) { return (size + LANES - 1) / LANES * LANES; }

/* hidden = x + change; out = weight * hidden * scale, scale = 1 / sqrt(mean hidden^2 + eps). No change: hidden is x. */
void add_norm(const float *x_RD, const float *change_RD, const float *restrict weight_D, float *hidden_RD, float *restrict out_RD,
              float *scale_R, float eps, whole R, whole D) {
    for (whole r = 0; r < R; r++) {
        const float *x = x_RD + r * D;
        float *restrict out = out_RD + r * D;
        if (change_RD) {
            float *restrict hidden = hidden_RD + r * D;
            for (whole d = 0; d < D; d++) hidden[d] = x[d] + change_RD[r * D + d];
            x = hidden;
        }
        const float scale = scale_R[r] = 1.0f / sqrtf(square_sum(x, D) / (float)D + eps);
        for (whole d = 0; d < D; d++) out[d] = weight_D[d] * (x[d] * scale);
    }
}

/* d_x = d_hidden + scale (d_n - n mean(d_n n)), n = hidden scale, d_n = d_out weight; d_out is the sum of up to three. The weight's
   gradient is added to d_weight. */
void add_norm_back(const float *hidden_RD, const float *restrict weight_D, const float *scale_R, const float *grad_RD,
                   const float *grad2_RD, const float *grad3_RD, const float *d_hidden_RD, float *restrict d_x_RD,
                   float *restrict d_weight_D, whole R, whole D) {
    for (whole r = 0; r < R; r++) {
        const float *restrict hidden = hidden_RD + r * D, scale = scale_R[r];
        float *restrict d_x = d_x_RD + r * D;
        for (whole d = 0; d < D; d++) d_x[d] = grad_RD[r * D + d];
        if (grad2_RD)
            for (whole d = 0; d < D; d++) d_x[d] += grad2_RD[r * D + d];
        if (grad3_RD)
            for (whole d = 0; d < D; d++) d_x[d] += grad3_RD[r * D + d];
        for (whole d = 0; d < D; d++) {
            d_weight_D[d] += d_x[d] * (hidden[d] * scale);
            d_x[d] *= weight_D[d];
        }
        const float along = dot(d_x, hidden, D) * scale / (float)D * scale;
        for (whole d = 0; d < D; d++) d_x[d] = scale * (d_x[d] - hidden[d] * along);
        if (d_hidden_RD)
            for (whole d = 0; d < D; d++) d_x[d] += d_hidden_RD[r * D + d];
    }
}

/* silu(gate) * up; gate and up have rows at multiples of step */
void open_gate(const float *gate, const float *up, float *out_RF, whole step, whole R, whole F) {
    for (whole r = 0; r < R; r++) {
        const float *g = gate + r * step, *u = up + r * step;
        float *out = out_RF + r * F;
        whole f = 0;
        for (; f + LANES <= F; f += LANES) store(out + f, silu_times(load(g + f), load(u + f)));
        if (f < F) {
            const vec rest = silu_times(some(g + f, F - f, 0), some(u + f, F - f, 0));
            memcpy(out + f, &rest, (F - f) * sizeof(float));
        }
    }
}

INLINE void gate_back(vec gate, vec up, vec d_out, vec *d_gate, vec *d_up) {
    const vec share = 1.0f / (1.0f + exp_of(-gate));
    *d_up = d_out * (gate * share);
    *d_gate = d_out * up * share * (1.0f + gate * (1.0f - share));
}

void open_gate_back(const float *gate, const float *up, const float *d_out_RF, float *d_gate, float *d_up, whole step, whole R,
                    whole F) {
    for (whole r = 0; r < R; r++) {
        const float *g = gate + r * step, *u = up + r * step, *d_out = d_out_RF + r * F;
        float *to_gate = d_gate + r * step, *to_up = d_up + r * step;
        vec a, b;
        whole f = 0;
        for (; f + LANES <= F; f += LANES) {
            gate_back(load(g + f), load(u + f), load(d_out + f), &a, &b);
            store(to_gate + f, a);
            store(to_up + f, b);
        }
        if (f < F) {
            gate_back(some(g + f, F - f, 0), some(u + f, F - f, 0), some(d_out + f, F - f, 0), &a, &b);
            memcpy(to_gate + f, &a, (F - f) * sizeof(float));
            memcpy(to_up + f, &b, (F - f) * sizeof(float));
        }
    }
}

typedef struct {
    float *query, *key, *value;             /* rows of a token at multiples of a step of their own */
    whole query_step, key_step, value_step; /* in numbers */
} Heads;

/* (a, b) -> (a cos - b sin, b cos + a sin) of the two halves, times factor; a negative sin turns back */
INLINE void turn(const float *restrict x, const float *restrict cos, const float *restrict sin, float *restrict out, float factor,
                 float sign, whole C) {
    const whole half = C / 2;
    for (whole c = 0; c < half; c++) {
        const float a = x[c], b = x[c + half], s = sin[c] * sign;
        out[c] = (a * cos[c] - b * s) * factor;
        out[c + half] = (b * cos[c] + a * s) * factor;
    }
}

/* Queries turned and scaled, keys turned, values as they are, for tokens [first, last); head by head, as attention reads them */
void turn_heads(const Heads *from, const float *cos_LC, const float *sin_LC, float *turned_JLC, float scaling, whole L, whole H, whole K,
                whole C, whole first, whole last) {
    for (whole l = first; l < last; l++) {
        const float *cos = cos_LC + l * C, *sin = sin_LC + l * C;
        float *out = turned_JLC + l * C;
        for (whole h = 0; h < H; h++) turn(from->query + l * from->query_step + h * C, cos, sin, out + h * L * C, scaling, 1, C);
        for (whole k = 0; k < K; k++) turn(from->key + l * from->key_step + k * C, cos, sin, out + (H + k) * L * C, 1, 1, C);
        for (whole k = 0; k < K; k++)
            memcpy(out + (H + K + k) * L * C, from->value + l * from->value_step + k * C, C * sizeof(float));
    }
}

void turn_heads_back(const float *d_turned_JLC, const float *cos_LC, const float *sin_LC, const Heads *to, float scaling, whole L, whole H,
                     whole K, whole C, whole first, whole last) {
    for (whole l = first; l < last; l++) {
        const float *cos = cos_LC + l * C, *sin = sin_LC + l * C, *from = d_turned_JLC + l * C;
        for (whole h = 0; h < H; h++) turn(from + h * L * C, cos, sin, to->query + l * to->query_step + h * C, scaling, -1, C);
        for (whole k = 0; k < K; k++) turn(from + (H + k) * L * C, cos, sin, to->key + l * to->key_step + k * C, 1, -1, C);
        for (whole k = 0; k < K; k++) memcpy(to->value + l * to->value_step + k * C, from + (H + K + k) * L * C, C * sizeof(float));
    }
}

/* out[r, n] (+)= sum_k a[r, k] b[k, n]; a has any steps, rows of b and out are whole vectors */
typedef struct {
    const float *a;
    whole a_row, a_term;
    const float *b;
    whole b_row;
    float *out;
    whole out_row, terms;
    int is_added;
} Product;

INLINE void tile(Product p, whole r, whole n, const int rows, const int parts) {
    vec sum[TILE][PARTS];
    const float *a = p.a + r * p.a_row, *b = p.b + n;
    float *out = p.out + r * p.out_row + n;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < parts; j++) sum[i][j] = p.is_added ? load(out + i * p.out_row + j * LANES) : all(0);
    for (whole k = 0; k < p.terms; k++) {
        vec part[PARTS];
        for (int j = 0; j < parts; j++) part[j] = load(b + k * p.b_row + j * LANES);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < parts; j++) sum[i][j] += a[i * p.a_row + k * p.a_term] * part[j];
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < parts; j++) store(out + i * p.out_row + j * LANES, sum[i][j]);
}

INLINE void tiles(Product p, whole r, whole size, const int rows) {
    whole n = 0;
    for (; n + PARTS * LANES <= size; n += PARTS * LANES) tile(p, r, n, rows, PARTS);
    switch ((size - n) / LANES) { /* PARTS is at most 4 */
        case 3: tile(p, r, n, rows, PARTS > 2 ? 3 : 1); break;
        case 2: tile(p, r, n, rows, 2); break;
        case 1: tile(p, r, n, rows, 1);
    }
}

static void multiply(Product p, whole rows, whole size) {
    whole r = 0;
    for (; r + TILE <= rows; r += TILE) tiles(p, r, size, TILE);
    switch (rows - r) { /* TILE is at most 6 */
        case 5: tiles(p, r, size, 5); break;
        case 4: tiles(p, r, size, 4); break;
        case 3: tiles(p, r, size, 3); break;
        case 2: tiles(p, r, size, 2); break;
        case 1: tiles(p, r, size, 1);
    }
}

typedef struct { /* rows order_N[start_P1[p]] to order_N[start_P1[p + 1]] continue prompt p, which has length_P[p] tokens */
    const whole *length_P, *order_N, *start_P1;
    whole P, W, N, S, H, K, C;
} Layout;

typedef struct { /* tokens of one attention: the prompt's, then the response's; queries are the last of them */
    whole prompt, own;     /* first flat token of each */
    whole num_prompt, num; /* tokens of the prompt, of both; a prompt alone is `own` */
} Span;

INLINE whole tokens_of(const Layout *t) { return t->P * t->W + t->N * t->S; }
INLINE whole token_of(Span s, whole l) { return l < s.num_prompt ? s.prompt + l : s.own + l - s.num_prompt; }

/* Heads of tokens [from, to) as rows of whole vectors, zeros at their end */
INLINE void gather(const float *x, whole step, Span s, whole from, whole to, float *out, whole C) {
    const whole width = in_vectors(C);
    for (whole l = from; l < to; l++) {
        memcpy(out + l * width, x + token_of(s, l) * step, C * sizeof(float));
        for (whole c = C; c < width; c++) out[l * width + c] = 0;
    }
}

/* The same as columns: out[c, l] */
INLINE void gather_columns(const float *x, Span s, whole from, whole to, float *out, whole room, whole C) {
    whole l = from;
    for (; l + LANES <= to; l += LANES)
        for (whole c = 0; c < C; c++) {
            const float *first = x + token_of(s, l) * C + c; /* tokens of a span that are gathered at once lie together */
            vec column;
            for (int i = 0; i < LANES; i++) column[i] = first[i * C];
            store(out + c * room + l, column);
        }
    for (; l < to; l++)
        for (whole c = 0; c < C; c++) out[c * room + l] = x[token_of(s, l) * C + c];
}

/* Scores in place become exp(score - top) where a token is seen and 0 up to the end, whole vectors; the log of their sum */
INLINE float shares(float *score, whole num_seen, whole end, float *total) {
    for (whole l = num_seen; l < end; l++) score[l] = -INFINITY;
    vec high = load(score), sum = all(0);
    for (whole l = LANES; l < end; l += LANES) high = chosen(load(score + l) > high, load(score + l), high);
    const float top = max_of(high);
    for (whole l = 0; l < end; l += LANES) {
        const vec part = exp_of(load(score + l) - top);
        store(score + l, part);
        sum += part;
    }
    *total = sum_of(sum);
    return top + logf(*total);
}

/* One query head of a span: queries of tokens [num_prompt, num), each of which sees the tokens up to itself */
static void attend(const Layout *t, Span s, whole h, const float *turned_JLC, const float *keys_CL, const float *values_LC, float *score,
                   float *mixed, whole room, float *out_LHC, float *log_sum_LH) {
    const whole C = t->C, width = in_vectors(C);
    for (whole first = s.num_prompt; first < s.num; first += TILE) {
        const whole rows = least(TILE, s.num - first), seen = first + rows, end = in_vectors(seen);
        const float *query = turned_JLC + (h * tokens_of(t) + token_of(s, first)) * C;
        float total[TILE];
        multiply((Product){query, C, 1, keys_CL, room, score, room, C, 0}, rows, end);
        for (whole r = 0; r < rows; r++)
            log_sum_LH[token_of(s, first + r) * t->H + h] = shares(score + r * room, first + r + 1, end, total + r);
        multiply((Product){score, room, 1, values_LC, width, mixed, width, seen, 0}, rows, width);
        for (whole r = 0; r < rows; r++) {
            float *out = out_LHC + (token_of(s, first + r) * t->H + h) * C;
            const float share = 1.0f / total[r];
            for (whole c = 0; c < C; c++) out[c] = mixed[r * width + c] * share;
        }
    }
}

/* Softmax attention of units [first, last): unit p K + k is key-value head k of a prompt and its responses. What pads a prompt is 0. */
void attention(const Layout *t, const float *turned_JLC, float *out_LHC, float *log_sum_LH, whole first, whole last) {
    const whole C = t->C, width = in_vectors(C), G = t->H / t->K, size = tokens_of(t) * C, room = in_vectors(t->W + t->S);
    float *keys = calloc(room * (C + width + TILE) + TILE * width, sizeof(float));
    float *values = keys + room * C, *score = values + room * width, *mixed = score + room * TILE;
    for (whole unit = first; unit < last; unit++) {
        const whole p = unit / t->K, k = unit % t->K;
        const float *key = turned_JLC + (t->H + k) * size, *value = key + t->K * size;
        Span s = {0, p * t->W, 0, t->length_P[p]};
        for (whole i = t->start_P1[p] - 1; i < t->start_P1[p + 1]; i++) {
            if (i >= t->start_P1[p]) s = (Span){p * t->W, t->P * t->W + t->order_N[i] * t->S, t->length_P[p], t->length_P[p] + t->S};
            gather_columns(key, s, s.num_prompt, s.num, keys, room, C);
            gather(value, C, s, s.num_prompt, s.num, values, C);
            for (whole h = k * G; h < (k + 1) * G; h++)
                attend(t, s, h, turned_JLC, keys, values, score, mixed, room, out_LHC, log_sum_LH);
        }
        for (whole l = p * t->W + t->length_P[p]; l < (p + 1) * t->W; l++) memset(out_LHC + (l * t->H + k * G) * C, 0, G * C * sizeof(float));
    }
    free(keys);
}

typedef struct { /* memory of a backward; keys and values as columns, and keys and gradients as rows */
    float *keys_CL, *values_CL, *keys_LC, *d_keys_LC, *d_values_LC, *query, *d_out, *share, *d_score, *d_query;
    whole room;
} Scratch;

static Scratch scratch_of(const Layout *t) {
    const whole room = in_vectors(t->W + t->S), width = in_vectors(t->C);
    Scratch m = {.room = room};
    float **parts[] = {&m.keys_CL, &m.values_CL, &m.keys_LC, &m.d_keys_LC, &m.d_values_LC,
                       &m.query,   &m.d_out,     &m.share,   &m.d_score,   &m.d_query};
    const whole sizes[] = {room * t->C,   room * t->C,   room * width, room * width, room * width,
                           BLOCK * width, BLOCK * width, BLOCK * room, BLOCK * room, TILE * width};
    whole size = 0;
    for (int i = 0; i < 10; i++) size += sizes[i];
    float *at = calloc(size, sizeof(float));
    for (int i = 0; i < 10; at += sizes[i++]) *parts[i] = at;
    return m;
}

/* The shares of a row of queries again, and what is asked of its scores */
INLINE void score_back(float *share, float *d_score, whole num_seen, whole end, whole whole_end, float log_sum, float along) {
    for (whole l = 0; l < end; l += LANES) {
        const vec part = exp_of(load(share + l) - log_sum);
        store(share + l, part);
        store(d_score + l, part * (load(d_score + l) - along));
    }
    for (whole l = num_seen; l < whole_end; l++) share[l] = d_score[l] = 0;
}

/* The backward of `attend`; gradients of keys and values are added to those of the span */
static void attend_back(const Layout *t, Span s, whole h, const float *turned_JLC, const float *out_LHC, const float *log_sum_LH,
                        const float *d_out_LHC, float *d_turned_JLC, Scratch m) {
    const whole C = t->C, width = in_vectors(C), room = m.room;
    const whole head = h * tokens_of(t) * C;
    for (whole start = s.num_prompt; start < s.num; start += BLOCK) {
        const whole size = least(BLOCK, s.num - start), block_end = in_vectors(start + size);
        const Span block = {0, token_of(s, start), 0, size};
        gather(turned_JLC + head, C, block, 0, size, m.query, C);
        gather(d_out_LHC + h * C, t->H * C, block, 0, size, m.d_out, C);
        for (whole first = 0; first < size; first += TILE) {
            const whole rows = least(TILE, size - first), seen = start + first + rows, end = in_vectors(seen);
            float *share = m.share + first * room, *d_score = m.d_score + first * room;
            multiply((Product){m.query + first * width, width, 1, m.keys_CL, room, share, room, C, 0}, rows, end);
            multiply((Product){m.d_out + first * width, width, 1, m.values_CL, room, d_score, room, C, 0}, rows, end);
            for (whole r = 0; r < rows; r++) {
                const whole at = (block.own + first + r) * t->H + h;
                const float along = dot(out_LHC + at * C, d_out_LHC + at * C, C);
                score_back(share + r * room, d_score + r * room, start + first + r + 1, end, block_end, log_sum_LH[at], along);
            }
            multiply((Product){d_score, room, 1, m.keys_LC, width, m.d_query, width, seen, 0}, rows, width);
            for (whole r = 0; r < rows; r++)
                memcpy(d_turned_JLC + head + (block.own + first + r) * C, m.d_query + r * width, C * sizeof(float));
        }
        multiply((Product){m.d_score, 1, room, m.query, width, m.d_keys_LC, width, size, 1}, start + size, width);
        multiply((Product){m.share, 1, room, m.d_out, width, m.d_values_LC, width, size, 1}, start + size, width);
    }
}

/* Gradients of keys and values of tokens [from, to) to their place, and zeros in theirs */
INLINE void scatter(Scratch m, Span s, whole from, whole to, float *d_key, float *d_value, whole C) {
    const whole width = in_vectors(C);
    for (whole l = from; l < to; l++) {
        memcpy(d_key + token_of(s, l) * C, m.d_keys_LC + l * width, C * sizeof(float));
        memcpy(d_value + token_of(s, l) * C, m.d_values_LC + l * width, C * sizeof(float));
    }
    memset(m.d_keys_LC + from * width, 0, (to - from) * width * sizeof(float));
    memset(m.d_values_LC + from * width, 0, (to - from) * width * sizeof(float));
}

/* Gradients of a prompt's keys and values are added over its responses, in their order, then over its own queries */
void attention_back(const Layout *t, const float *turned_JLC, const float *out_LHC, const float *log_sum_LH, const float *d_out_LHC,
                    float *d_turned_JLC, whole first, whole last) {
    const whole C = t->C, G = t->H / t->K, size = tokens_of(t) * C;
    Scratch m = scratch_of(t);
    for (whole unit = first; unit < last; unit++) {
        const whole p = unit / t->K, k = unit % t->K, begin = t->start_P1[p], end = t->start_P1[p + 1], num = t->length_P[p];
        const whole key = (t->H + k) * size, value = key + t->K * size, pad = (p * t->W + num) * C;
        for (whole i = begin - 1; i <= end; i++) { /* before the responses the prompt's keys are read, after them its queries go back */
            const int is_response = i >= begin && i < end;
            Span s = {0, p * t->W, 0, num};
            if (is_response) s = (Span){p * t->W, t->P * t->W + t->order_N[i] * t->S, num, num + t->S};
            if (i < end) {
                gather_columns(turned_JLC + key, s, s.num_prompt, s.num, m.keys_CL, m.room, C);
                gather_columns(turned_JLC + value, s, s.num_prompt, s.num, m.values_CL, m.room, C);
                gather(turned_JLC + key, C, s, s.num_prompt, s.num, m.keys_LC, C);
            }
            for (whole h = k * G; i >= begin && h < (k + 1) * G; h++)
                attend_back(t, s, h, turned_JLC, out_LHC, log_sum_LH, d_out_LHC, d_turned_JLC, m);
            if (i >= begin) scatter(m, s, s.num_prompt, s.num, d_turned_JLC + key, d_turned_JLC + value, C);
        }
        for (whole h = k * G; h < (k + 1) * G; h++) memset(d_turned_JLC + h * size + pad, 0, (t->W - num) * C * sizeof(float));
        memset(d_turned_JLC + key + pad, 0, (t->W - num) * C * sizeof(float));
        memset(d_turned_JLC + value + pad, 0, (t->W - num) * C * sizeof(float));
    }
    free(m.keys_CL);
}
