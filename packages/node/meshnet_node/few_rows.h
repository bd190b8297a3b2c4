/* 64 outputs of up to four rows, of a bfloat16 matrix in columns: a pair of inputs has its weights for all of them together, [64][2]. The
   sums stay in registers while these go by, fetched ahead, since they come from memory and are used once. Include row_values.h before. */

enum { COLUMN = 64, FEW = 4, FETCHED_AHEAD = 4096 };

/* `count` is a constant. The second of a pair is added first, as CPUs do that multiply pairs. */
static inline __attribute__((always_inline)) void add_up(const int count, const bf16 *weight, const bf16 *const *inputs, int in,
                                                          float sums[FEW][COLUMN]) {
    const uint32_t *pairs = (const uint32_t *)(const void *)weight;
    for (int at = 0; at < in; at += 2, pairs += COLUMN) {
        for (int line = 0; line < 4 * COLUMN; line += 64) __builtin_prefetch((const char *)pairs + FETCHED_AHEAD + line);
        for (int row = 0; row < count; row++) {
            float first = wide(inputs[row][at]), second = wide(inputs[row][at + 1]);
            for (int i = 0; i < COLUMN; i++) {
                sums[row][i] += second * of_bits(pairs[i] & 0xffff0000u);
                sums[row][i] += first * of_bits(pairs[i] << 16);
            }
        }
    }
}

/* bias: of these outputs, or null. */
static inline __attribute__((always_inline)) void few(const int count, const bf16 *weight, const bf16 *bias, const bf16 *const *inputs,
                                                       int in, bf16 *const *outputs) {
    float sums[FEW][COLUMN];
    for (int row = 0; row < count; row++)
        for (int i = 0; i < COLUMN; i++) sums[row][i] = bias ? wide(bias[i]) : 0.0f;
    add_up(count, weight, inputs, in, sums);
    for (int row = 0; row < count; row++)
        for (int i = 0; i < COLUMN; i++) outputs[row][i] = narrow(sums[row][i]);
}

static void few_rows(int count, const bf16 *weight, const bf16 *bias, const bf16 *const *inputs, int in, bf16 *const *outputs) {
    switch (count) {
    case 1: few(1, weight, bias, inputs, in, outputs); break;
    case 2: few(2, weight, bias, inputs, in, outputs); break;
    case 3: few(3, weight, bias, inputs, in, outputs); break;
    default: few(4, weight, bias, inputs, in, outputs);
    }
}
