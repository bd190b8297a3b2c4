/* What chunks' products and attention have in common: rows by a block of a matrix, 64 outputs wide, for CPUs with AVX-512. Sums are made in
   the order that is written here: a compiler that may choose one chooses one that the registers have no room for. */

#include <stdint.h>
#include <string.h>

#include "parallel.h"

enum { FLOATS, WIDENED, PAIRS }; /* of float32; of bfloat16, widened to float32, or multiplied two by two */

#ifdef __AVX512F__

#include <immintrin.h>

enum { COLUMN = 64, VECTOR = 16, ROWS = 6, LINE = 64 };

typedef uint16_t bf16;
typedef float vector __attribute__((vector_size(4 * VECTOR)));

#ifdef __AVX512BF16__
enum { WAYS = 3 };

static inline vector add_pairs(vector sum, const char *x, const char *line) {
    int both;
    memcpy(&both, x, 4);
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(both), (__m512bh)_mm512_loadu_si512(line));
}

static inline void narrow(const float *from, bf16 *to) {
    _mm256_storeu_si256((__m256i *)(void *)to, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from)));
}
#else
enum { WAYS = 2 };

static inline vector add_pairs(vector sum, const char *x, const char *line) { return (void)x, (void)line, sum; }

static inline void narrow(const float *from, bf16 *to) { /* to nearest, ties to even; what is no number stays none */
    __m512 values = _mm512_loadu_ps(from);
    __m512i bits = _mm512_castps_si512(values), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtepi32_epi16(bits));
}
#endif

static inline vector add_floats(vector sum, const char *x, const char *line) {
    float one;
    memcpy(&one, x, 4);
    return (vector)_mm512_fmadd_ps(_mm512_set1_ps(one), _mm512_loadu_ps(line), (__m512)sum);
}

static inline float wide(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

/* `rows` rows of x, `stride` bytes apart, by a block of so many entries of four bytes, an even number. A CPU adds the second product of a pair
   first, and so does what was widened. `from` has the sums so far; rows of both are so many values apart. */
static inline __attribute__((always_inline)) void tile(const int rows, const int way, const char *x, int64_t stride,
                                                        const char *block, int entries, const float *from,
                                                        int from_stride, float *sums, int stride_of_sums, const char *ahead,
                                                        int fetched) {
    vector sum[ROWS][COLUMN / VECTOR];
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < COLUMN / VECTOR; i++) sum[row][i] = *(const vector *)(from + row * from_stride + VECTOR * i);
    for (int entry = 0; entry < entries; entry += 2) {
        for (int line = 0; line < fetched; line++, ahead += LINE) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            int at = entry + (way == WIDENED ? 1 - half : half);
            const char *lines = block + (int64_t)at * COLUMN * 4;
#pragma GCC unroll 6
            for (int row = 0; row < rows; row++) {
                const char *own = x + row * stride + 4 * (int64_t)at;
#pragma GCC unroll 4
                for (int i = 0; i < COLUMN / VECTOR; i++)
                    sum[row][i] = way == PAIRS ? add_pairs(sum[row][i], own, lines + LINE * i)
                                               : add_floats(sum[row][i], own, lines + LINE * i);
            }
        }
    }
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < COLUMN / VECTOR; i++) *(vector *)(sums + row * stride_of_sums + VECTOR * i) = sum[row][i];
}

#endif
