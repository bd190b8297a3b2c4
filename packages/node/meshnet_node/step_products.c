/* Products of a step's rows with bfloat16 matrices in columns. Each 64 outputs are one thread's, whose weights come from memory once: rows
   beyond the first four find them in the core's second cache. Sums are made in the order that is written, which is that of a chunk's products
   (chunk_products.c): a row gets the same bits, however many go with it. Built and called by step_kernels.py, which says what the arguments are. */

#include "parallel.h"
#include "row_values.h"
#include "few_rows.h"
#include "matrix.h"

typedef struct {
    const matrix *of;
    const bf16 *x;
    bf16 *out;
    int rows, taken; /* columns that were begun */
} product;

static void column(const product *job, int number) {
    const matrix *of = job->of;
    const bf16 *weight = (const bf16 *)of->weight + (int64_t)number * COLUMN * of->in;
    const bf16 *bias = of->bias ? (const bf16 *)of->bias + number * COLUMN : 0;
    for (int row = 0; row < job->rows; row += FEW) {
        int count = job->rows - row < FEW ? job->rows - row : FEW;
        const bf16 *inputs[FEW];
        bf16 *outputs[FEW];
        for (int own = 0; own < count; own++) {
            inputs[own] = job->x + (int64_t)(row + own) * of->in;
            outputs[own] = job->out + (int64_t)(row + own) * of->out + (int64_t)number * COLUMN;
        }
        few_rows(count, weight, bias, inputs, of->in, outputs);
    }
}

static void take_columns(void *data) {
    product *job = data;
    for (int number; (number = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED)) < job->of->out / COLUMN;)
        column(job, number);
}

void meshnet_few(const matrix *of, int rows, const bf16 *x, bf16 *out, int threads, parallel *run) {
    product job = {of, x, out, rows, 0};
    if (threads > 1)
        run(take_columns, &job, (unsigned)threads, 0);
    else
        take_columns(&job);
}
