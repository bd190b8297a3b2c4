/* Products of a chunk's rows with matrices in columns.

       outputs 0-63      [ inputs 0-95 ][ 96-191 ][ ... ]    a block stays in the core's first cache while all rows go
       64-127            [ ........... ][ ...... ][ ... ]    over it, six at a time, with their sums in registers

   Meanwhile the next block is fetched from memory, so that its products need not wait for it. Built and called by step_kernels.py, which says
   what the arguments are. */

#include "chunk_tile.h"
#include "matrix.h"

#ifdef __AVX512F__

enum { MOST_BLOCK = 96, EVEN = 4, LEAST_SHARE = 24 }; /* panels for each thread that are enough; rows that are worth a share */

typedef struct {
    const matrix *of;
    int rows, shares, parts, taken; /* shares of the rows; parts of the work, and those that were begun */
    const char *x;
    char *out;
    float *widened; /* all of x */
    float *room;    /* for each part: a block in float32, and the sums of all rows */
} product;

/* Pairs of a block, [inputs / 2][64][2], as float32, [inputs][64]. */
static void widen_block(const char *block, int inputs, float *to) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    for (int pair = 0; pair < inputs / 2; pair++, to += 2 * COLUMN)
        for (int i = 0; i < COLUMN; i += VECTOR, block += LINE) {
            __m512i both = _mm512_loadu_si512(block);
            _mm512_storeu_si512(to + i, _mm512_slli_epi32(both, 16));
            _mm512_storeu_si512(to + COLUMN + i, _mm512_and_si512(both, upper));
        }
}

/* Rows [top, bottom) by a block. */
static inline __attribute__((always_inline)) void block_by(const int way, const product *job, int top, int bottom,
                                                            const char *block, int start, int inputs, const float *first,
                                                            float *sums, const char *ahead, int64_t ahead_bytes) {
    int size = way == PAIRS ? 2 : 4, entries = inputs * size / 4, rows = bottom - top, groups = (rows + ROWS - 1) / ROWS;
    int64_t stride = (int64_t)job->of->in * size, lines = ahead_bytes / LINE, turns = entries / 2;
    int fetched = (int)((lines + turns * groups - 1) / (turns * groups));
    const char *all = (way == WIDENED ? (const char *)job->widened : job->x) + top * stride + (int64_t)start * size;
    for (int group = 0; group < groups; group++) {
        int row = (int)((int64_t)rows * group / groups), next = (int)((int64_t)rows * (group + 1) / groups);
        const char *x = all + row * stride, *share = ahead + group * turns * fetched * LINE;
        const float *from = start ? sums + (int64_t)row * COLUMN : first;
#define TILE(COUNT) \
    case COUNT: \
        tile(COUNT, way, x, stride, block, entries, from, start ? COLUMN : 0, sums + (int64_t)row * COLUMN, COLUMN, \
             share, share < ahead + ahead_bytes ? fetched : 0); \
        break
        switch (next - row) { TILE(1); TILE(2); TILE(3); TILE(4); TILE(5); TILE(6); }
    }
}

/* 64 outputs of rows [top, bottom). */
static void panel(const product *job, int number, int top, int bottom, float *room) {
    const matrix *of = job->of;
    int size = of->way == FLOATS ? 4 : 2, blocks = (of->in + MOST_BLOCK - 1) / MOST_BLOCK;
    int most = ((of->in + blocks - 1) / blocks + 3) / 4 * 4;
    int64_t bytes = (int64_t)of->in * COLUMN * size;
    const char *weight = (const char *)of->weight + number * bytes, *end = (const char *)of->weight + of->out / COLUMN * bytes;
    float *sums = room + COLUMN * MOST_BLOCK;
    float first[COLUMN] __attribute__((aligned(LINE))) = {0};
    if (of->bias)
        for (int i = 0; i < COLUMN; i++)
            first[i] = size == 4 ? ((const float *)of->bias)[number * COLUMN + i]
                                 : wide(((const bf16 *)of->bias)[number * COLUMN + i]);
    for (int start = 0, inputs; start < of->in; start += inputs) {
        inputs = of->in - start < most ? of->in - start : most;
        int64_t length = (int64_t)inputs * COLUMN * size;
        const char *block = weight, *ahead = weight += length;
        int64_t fetched = end - ahead < length ? end - ahead : length;
        if (of->way == WIDENED) widen_block(block, inputs, room), block = (const char *)room;
        switch (of->way) {
        case FLOATS: block_by(FLOATS, job, top, bottom, block, start, inputs, first, sums, ahead, fetched); break;
        case WIDENED: block_by(WIDENED, job, top, bottom, block, start, inputs, first, sums, ahead, fetched); break;
        default: block_by(PAIRS, job, top, bottom, block, start, inputs, first, sums, ahead, fetched);
        }
    }
    char *out = job->out + ((int64_t)top * of->out + (int64_t)number * COLUMN) * size;
    for (int row = top; row < bottom; row++, sums += COLUMN, out += (int64_t)of->out * size)
        if (size == 4)
            memcpy(out, sums, COLUMN * sizeof(float));
        else
            for (int i = 0; i < COLUMN; i += VECTOR) narrow(sums + i, (bf16 *)(void *)out + i);
}

static void take_parts(void *data) {
    product *job = data;
    int64_t panels = job->of->out / COLUMN, tasks = panels * job->shares;
    for (int64_t part; (part = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED)) < job->parts;) {
        float *room = job->room + part * COLUMN * (MOST_BLOCK + job->rows);
        for (int64_t task = tasks * part / job->parts; task < tasks * (part + 1) / job->parts; task++) {
            int64_t share = task / panels;
            panel(job, (int)(task % panels), (int)(job->rows * share / job->shares),
                  (int)(job->rows * (share + 1) / job->shares), room);
        }
    }
}

static void widen_parts(void *data) {
    product *job = data;
    int64_t count = (int64_t)job->rows * job->of->in;
    for (int64_t part; (part = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED)) < job->parts;)
        for (int64_t i = count * part / job->parts; i < count * (part + 1) / job->parts; i++)
            job->widened[i] = wide(((const bf16 *)(const void *)job->x)[i]);
}

static int64_t widened_values(const matrix *of, int rows) {
    return of->way == WIDENED ? ((int64_t)rows * of->in + VECTOR - 1) / VECTOR * VECTOR : 0;
}

int64_t meshnet_product_room(const matrix *of, int rows, int threads) {
    return widened_values(of, rows) + (int64_t)threads * COLUMN * (MOST_BLOCK + rows);
}

/* `room` is aligned to 64 bytes, and has what the function above says. */
void meshnet_product(const matrix *of, int rows, const void *x, void *out, float *room, int threads, parallel *run) {
    product job = {of, rows, 1, threads, 0, x, out, room, room + widened_values(of, rows)};
    int panels = of->out / COLUMN, most = (rows + LEAST_SHARE - 1) / LEAST_SHARE;
    if (threads > 1 && panels < EVEN * threads) { /* so few that some threads would have nothing to do at the end */
        int wanted = (EVEN * threads + panels - 1) / panels;
        job.shares = wanted < most ? wanted : most;
    }
    if (of->way == WIDENED) {
        threads > 1 ? run(widen_parts, &job, (unsigned)threads, 0) : widen_parts(&job);
        job.taken = 0;
    }
    threads > 1 ? run(take_parts, &job, (unsigned)threads, 0) : take_parts(&job);
}

int meshnet_product_ways(void) { return WAYS; }

#else
int meshnet_product_ways(void) { return 0; }
int64_t meshnet_product_room(const matrix *of, int rows, int threads) { return (void)of, (void)rows, (void)threads, 0; }
void meshnet_product(const matrix *of, int rows, const void *x, void *out, float *room, int threads, parallel *run) {
    (void)of, (void)rows, (void)x, (void)out, (void)room, (void)threads, (void)run;
}
#endif
