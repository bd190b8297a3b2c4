/* Values of 16 bits and wider ones, and functions of one. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float of_bits(uint32_t bits) {
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

static inline float wide(bf16 value) { return of_bits((uint32_t)value << 16); }

static inline bf16 narrow(float value) { /* to nearest, ties to even; what is no number stays none */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bf16)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static inline float rounded(float value) { return wide(narrow(value)); }

/* e^x as Cephes' expf has it (https://www.netlib.org/cephes/): 2^n times a polynomial, without a branch. */
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    x -= n * 0.693359375f;
    x -= n * -2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return y * power;
}

static inline float silu(float x) { return x / (1.0f + exponential(-x)); }

typedef struct {
    const void *head_norm; /* [heads + key_heads, width], or null */
    int heads, key_heads, width, turns;
    float scaling, eps;
} attention;
