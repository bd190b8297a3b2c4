/* The small operations of a chunk: what step_kernels.c has for rows of a step, in bfloat16 and float32, the rows spread over threads. */

#include "parallel.h"
#include "row_values.h"

#define REAL bf16
#define OF(name) name##_bf16
#define WIDE wide
#define NARROW narrow
#include "row_ops.h"

#define REAL float
#define OF(name) name##_float
#define WIDE(value) (value)
#define NARROW(value) (value)
#include "row_ops.h"

typedef struct {
    void (*row)(const void *of, int64_t row);
    const void *of;
    int rows, parts, taken;
} spread;

static void take_rows(void *data) {
    spread *all = data;
    for (int64_t part; (part = __atomic_fetch_add(&all->taken, 1, __ATOMIC_RELAXED)) < all->parts;)
        for (int64_t row = all->rows * part / all->parts; row < all->rows * (part + 1) / all->parts; row++) all->row(all->of, row);
}

static void over_rows(void (*row)(const void *, int64_t), const void *of, int rows, int threads, parallel *run) {
    spread all = {row, of, rows, threads, 0};
    if (threads > 1)
        run(take_rows, &all, (unsigned)threads, 0);
    else
        take_rows(&all);
}

/* Of the type of a row's values. */
#define AS(is_float, DO) \
    if (is_float) { \
        DO(float, _float) \
    } else { \
        DO(bf16, _bf16) \
    }

typedef struct {
    void *x, *out;
    const void *other, *weight;
    int is_float, width;
    float eps;
} sum;

static void add_norm(const void *of, int64_t row) {
    const sum *at = of;
    int64_t from = row * at->width;
#define DO(TYPE, SUFFIX) \
    TYPE *x = (TYPE *)at->x + from; \
    if (at->other) add_row##SUFFIX(x, (const TYPE *)at->other + from, at->width); \
    if (at->weight) norm_row##SUFFIX(x, at->weight, (TYPE *)at->out + from, at->width, at->eps);
    AS(at->is_float, DO)
#undef DO
}

void meshnet_chunk_add_norm(int is_float, void *x, const void *other, const void *weight, void *out, int rows, int width, float eps,
                            int threads, parallel *run) {
    sum of = {x, out, other, weight, is_float, width, eps};
    over_rows(add_norm, &of, rows, threads, run);
}

typedef struct {
    const void *gate_up;
    void *out;
    int is_float, width;
} gates;

static void silu_mul(const void *of, int64_t row) {
    const gates *at = of;
#define DO(TYPE, SUFFIX) \
    const TYPE *gate = (const TYPE *)at->gate_up + 2 * row * at->width; \
    silu_mul_row##SUFFIX(gate, gate + at->width, (TYPE *)at->out + row * at->width, at->width);
    AS(at->is_float, DO)
#undef DO
}

void meshnet_chunk_silu_mul(int is_float, const void *gate_up, void *out, int rows, int width, int threads, parallel *run) {
    gates of = {gate_up, out, is_float, width};
    over_rows(silu_mul, &of, rows, threads, run);
}

typedef struct {
    const attention *at;
    void *qkv, *keys, *values;
    const void *cosines, *sines;
    int64_t key_stride, value_stride, before;
    int is_float;
} taking;

static void take_one_in(const void *of, int64_t row) {
    const taking *all = of;
    int64_t width = all->at->width, wide_row = (all->at->heads + 2 * all->at->key_heads) * width;
#define DO(TYPE, SUFFIX) \
    take_in##SUFFIX(all->at, (TYPE *)all->qkv + row * wide_row, (const TYPE *)all->cosines + row * width, \
                    (const TYPE *)all->sines + row * width, all->keys, all->values, all->key_stride, all->value_stride, \
                    all->before + row + 1);
    AS(all->is_float, DO)
#undef DO
}

void meshnet_chunk_take_in(const attention *at, int is_float, int rows, void *qkv, const void *cosines, const void *sines, void *keys,
                           void *values, int64_t key_stride, int64_t value_stride, int64_t before, int threads,
                           parallel *run) {
    taking of = {at, qkv, keys, values, cosines, sines, key_stride, value_stride, before, is_float};
    over_rows(take_one_in, &of, rows, threads, run);
}
