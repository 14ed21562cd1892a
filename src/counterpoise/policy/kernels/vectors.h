/* Vectors of floats, and what is computed with them. Included by the C sources of policy and of sampling. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef int64_t whole;
typedef float v4 __attribute__((vector_size(16)));
#ifdef __AVX__
enum { LANES = 8, WIDE = 12, TILE = 6 }; /* floats of a vector; vectors that registers hold as sums; rows of a matmul's tile */
#else
enum { LANES = 4, WIDE = 16, TILE = 4 };
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t mask __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));

INLINE vec load(const float *from) {
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, vec x) { memcpy(to, &x, sizeof x); }

INLINE vec all(float x) { return x - (vec){0}; }

INLINE vec chosen(mask is, vec yes, vec no) { return (vec)((is & (mask)yes) | (~is & (mask)no)); }

INLINE v4 halved(vec x) {
#ifdef __AVX__
    v4 half[2];
    memcpy(half, &x, sizeof x);
    return half[0] + half[1];
#else
    return x;
#endif
}

INLINE v4 pair_sums(v4 a, v4 b) { /* a0+a1, a2+a3, b0+b1, b2+b3 */
#ifdef __clang__
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#else
    typedef int32_t order __attribute__((vector_size(16)));
    return __builtin_shuffle(a, b, (order){0, 2, 4, 6}) + __builtin_shuffle(a, b, (order){1, 3, 5, 7});
#endif
}

INLINE float sum_of(vec x) {
    v4 s = halved(x);
    return (s[0] + s[1]) + (s[2] + s[3]);
}

INLINE float max_of(vec x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* exp to an ulp or two: 2^n e^r with |r| <= ln 2 / 2 and e^r by its series; 0 under -87, bounded above 88. */
INLINE vec exp_of(vec x) {
    vec y = chosen(x < all(-87.0f), all(-87.0f), x);
    y = chosen(y > all(88.0f), all(88.0f), y);
    vec shifted = y * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: the low bits are now round(y / ln 2) */
    vec n = shifted - 12582912.0f;
    vec r = (y - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts, the first exact in a few bits */
    vec p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return chosen(x < all(-87.0f), all(0.0f), p * (vec)(((bits)shifted << 23) + 0x3f800000u));
}

INLINE vec some(const float *from, whole num, float rest) { /* the first num numbers, then rest */
    vec x = all(rest);
    for (whole i = 0; i < num; i++) x[i] = from[i];
    return x;
}

INLINE float square_sum(const float *x, whole size) {
    vec sum = {0};
    whole d = 0;
    for (; d + LANES <= size; d += LANES) sum += load(x + d) * load(x + d);
    if (d < size) sum += some(x + d, size - d, 0) * some(x + d, size - d, 0);
    return sum_of(sum);
}

INLINE float dot(const float *q, const float *k, whole C) {
    vec sum = {0};
    whole c = 0;
    for (; c + LANES <= C; c += LANES) sum += load(q + c) * load(k + c);
    if (c < C) sum += some(q + c, C - c, 0) * some(k + c, C - c, 0);
    return sum_of(sum);
}

INLINE vec silu_times(vec gate, vec up) { return gate / (1.0f + exp_of(-gate)) * up; }
