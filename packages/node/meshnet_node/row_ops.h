/* What is made of a row by itself: norms, sums, gates, rope. For values of the type REAL, which WIDE makes float32, and NARROW of that;
   OF names the functions. Every sum is made in float32 and every result rounded where transformers' modules round it. */

#define ROUNDED(value) WIDE(NARROW(value))

static inline void OF(norm_row)(const REAL *x, const REAL *weight, REAL *out, int width, float eps) {
    float sum = 0.0f;
    for (int i = 0; i < width; i++) sum += WIDE(x[i]) * WIDE(x[i]);
    float scale = 1.0f / sqrtf(sum / (float)width + eps);
    for (int i = 0; i < width; i++) out[i] = NARROW(ROUNDED(WIDE(x[i]) * scale) * WIDE(weight[i]));
}

static inline void OF(add_row)(REAL *x, const REAL *other, int width) {
    for (int i = 0; i < width; i++) x[i] = NARROW(WIDE(x[i]) + WIDE(other[i]));
}

/* In two loops: in one, gcc makes the division anew for each way that rounding may go. */
static inline void OF(silu_mul_row)(const REAL *gate, const REAL *up, REAL *out, int width) {
    enum { SOME = 64 };
    float gates[SOME];
    for (int from = 0; from < width; from += SOME) {
        int count = width - from < SOME ? width - from : SOME;
        for (int i = 0; i < count; i++) gates[i] = silu(WIDE(gate[from + i]));
        for (int i = 0; i < count; i++) out[from + i] = NARROW(ROUNDED(gates[i]) * WIDE(up[from + i]));
    }
}

static inline void OF(turn_head)(REAL *head, const REAL *cosines, const REAL *sines, int width) {
    int half = width / 2;
    for (int i = 0; i < half; i++) {
        float first = WIDE(head[i]), second = WIDE(head[i + half]);
        head[i] = NARROW(ROUNDED(first * WIDE(cosines[i])) + ROUNDED(second * WIDE(sines[i])));
        head[i + half] = NARROW(ROUNDED(second * WIDE(cosines[i + half])) + ROUNDED(first * WIDE(sines[i + half])));
    }
}

/* Norms and turns queries and keys where they are, and writes keys and values to the last position of their slot. */
static inline void OF(take_in)(const attention *at, REAL *qkv, const REAL *cosines, const REAL *sines, REAL *keys, REAL *values,
                               int64_t key_stride, int64_t value_stride, int64_t positions) {
    int width = at->width, turning = at->heads + at->key_heads;
    const REAL *norms = at->head_norm;
    for (int head = 0; head < turning; head++) {
        REAL *own = qkv + (int64_t)head * width;
        if (norms) OF(norm_row)(own, norms + (int64_t)head * width, own, width, at->eps);
        if (at->turns) OF(turn_head)(own, cosines, sines, width);
    }
    const REAL *key = qkv + (int64_t)at->heads * width, *value = key + (int64_t)at->key_heads * width;
    int64_t last = (positions - 1) * width;
    for (int head = 0; head < at->key_heads; head++) {
        memcpy(keys + head * key_stride + last, key + (int64_t)head * width, (size_t)width * sizeof(REAL));
        memcpy(values + head * value_stride + last, value + (int64_t)head * width, (size_t)width * sizeof(REAL));
    }
}

#undef ROUNDED
#undef REAL
#undef OF
#undef WIDE
#undef NARROW
