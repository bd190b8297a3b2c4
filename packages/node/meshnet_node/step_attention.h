/* What heads that share keys and values do with a block of positions: its scores, and its values weighted. Two ways: any compiler's, and one
   for CPUs with AVX-512, where a score's sum over lanes would take as long as its products: four are made at once. Include row_values.h before. */

enum { MOST_HEADS = 4, MOST_WIDTH = 512, BLOCK = 256, LANES = 16, LINE = 64, AHEAD = 1024 }; /* values: fetched so many ahead */

/* What heads that share keys and values, `count` of them, ask for or find: of each pair of values the first ones, then the second ones. */
typedef float halves[MOST_HEADS][2][MOST_WIDTH / 2] __attribute__((aligned(LINE)));
typedef float weights[MOST_HEADS][BLOCK] __attribute__((aligned(LINE)));

static inline void fetch(const bf16 *from, int width) {
    for (int i = 0; i < width; i += LINE / 2) __builtin_prefetch(from + i, 0, 3);
}

#ifdef __AVX512F__
#include <immintrin.h>

enum { TOGETHER = 4, PAIRS = 2, SLICE = 2 * LANES * PAIRS }; /* positions scored at once; vectors of pairs whose sums are kept at once */
#define IS_WIDE(width) ((width) % SLICE == 0)

static inline __m512 first_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }

static inline __m512 second_of(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff)));
}

/* The sum of each of four vectors. */
static inline __m128 sums_of(const __m512 *of) {
    __m512d two = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(of[0], of[1]), _mm512_unpackhi_ps(of[0], of[1])));
    __m512d more = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(of[2], of[3]), _mm512_unpackhi_ps(of[2], of[3])));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(two, more)), _mm512_castpd_ps(_mm512_unpackhi_pd(two, more)));
    __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), upper);
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

static inline __attribute__((always_inline)) void score_wide(const int count, const int width, const halves asked, const bf16 *keys,
                                                              const bf16 *values, int positions, weights scores) {
    for (int at = 0; at < positions; at += TOGETHER) {
        const bf16 *rows[TOGETHER];
        for (int own = 0; own < TOGETHER; own++) {
            rows[own] = keys + (int64_t)(at + own < positions ? at + own : positions - 1) * width;
            fetch(rows[own] + AHEAD, width);
            fetch(values + (rows[own] - keys), width);
        }
        __m512 sum[MOST_HEADS][TOGETHER];
#pragma GCC unroll 4
        for (int head = 0; head < count; head++)
#pragma GCC unroll 4
            for (int own = 0; own < TOGETHER; own++) sum[head][own] = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int i = 0; i < width / 2; i += LANES) {
#pragma GCC unroll 4
            for (int own = 0; own < TOGETHER; own++) {
                __m512i pairs = _mm512_loadu_si512(rows[own] + 2 * i);
                __m512 first = first_of(pairs), second = second_of(pairs);
#pragma GCC unroll 4
                for (int head = 0; head < count; head++) {
                    sum[head][own] = _mm512_fmadd_ps(first, _mm512_load_ps(asked[head][0] + i), sum[head][own]);
                    sum[head][own] = _mm512_fmadd_ps(second, _mm512_load_ps(asked[head][1] + i), sum[head][own]);
                }
            }
        }
#pragma GCC unroll 4
        for (int head = 0; head < count; head++) _mm_store_ps(scores[head] + at, sums_of(sum[head]));
    }
}

static inline __attribute__((always_inline)) void collect_wide(const int count, const int width, const weights given, const bf16 *values,
                                                                int positions, halves found) {
    for (int from = 0; from < width / 2; from += LANES * PAIRS) {
        __m512 sum[MOST_HEADS][PAIRS][2];
#pragma GCC unroll 4
        for (int head = 0; head < count; head++)
#pragma GCC unroll 2
            for (int i = 0; i < PAIRS; i++) sum[head][i][0] = sum[head][i][1] = _mm512_setzero_ps();
        for (int at = 0; at < positions; at++) {
            const bf16 *row = values + (int64_t)at * width + 2 * from;
            __m512 own[PAIRS][2];
#pragma GCC unroll 2
            for (int i = 0; i < PAIRS; i++) {
                __m512i pairs = _mm512_loadu_si512(row + 2 * LANES * i);
                own[i][0] = first_of(pairs), own[i][1] = second_of(pairs);
            }
#pragma GCC unroll 4
            for (int head = 0; head < count; head++) {
                __m512 weight = _mm512_set1_ps(given[head][at]);
#pragma GCC unroll 2
                for (int i = 0; i < PAIRS; i++) {
                    sum[head][i][0] = _mm512_fmadd_ps(own[i][0], weight, sum[head][i][0]);
                    sum[head][i][1] = _mm512_fmadd_ps(own[i][1], weight, sum[head][i][1]);
                }
            }
        }
#pragma GCC unroll 4
        for (int head = 0; head < count; head++)
#pragma GCC unroll 2
            for (int i = 0; i < PAIRS; i++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) _mm512_store_ps(found[head][half] + from + LANES * i, sum[head][i][half]);
    }
}
#else
#define IS_WIDE(width) 0
#define score_wide score
#define collect_wide collect
#endif

static inline __attribute__((always_inline)) void score(const int count, const int width, const halves asked, const bf16 *keys,
                                                         const bf16 *values, int positions, weights scores) {
    for (int at = 0; at < positions; at++, keys += width, values += width) {
        uint32_t pairs[MOST_WIDTH / 2];
        memcpy(pairs, keys, (size_t)width * sizeof(bf16));
        fetch(keys + AHEAD, width);
        fetch(values, width);
        for (int head = 0; head < count; head++) {
            float sum = 0.0f;
            for (int i = 0; i < width / 2; i++)
                sum += asked[head][0][i] * of_bits(pairs[i] << 16) + asked[head][1][i] * of_bits(pairs[i] & 0xffff0000u);
            scores[head][at] = sum;
        }
    }
}

static inline __attribute__((always_inline)) void collect(const int count, const int width, const weights given, const bf16 *values,
                                                           int positions, halves found) {
    for (int head = 0; head < count; head++)
        for (int i = 0; i < width / 2; i++) found[head][0][i] = found[head][1][i] = 0.0f;
    for (int at = 0; at < positions; at++, values += width) {
        uint32_t pairs[MOST_WIDTH / 2];
        memcpy(pairs, values, (size_t)width * sizeof(bf16));
        for (int head = 0; head < count; head++)
            for (int i = 0; i < width / 2; i++) {
                found[head][0][i] += given[head][at] * of_bits(pairs[i] << 16);
                found[head][1][i] += given[head][at] * of_bits(pairs[i] & 0xffff0000u);
            }
    }
}
