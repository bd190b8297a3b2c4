/* Attention of a chunk's positions over all before them and their own, for CPUs with AVX-512: softmax of scores, block by block of keys, with
   sums that are scaled anew where a block has a greater score (https://arxiv.org/abs/2307.08691).

       keys and values 0-255    as float32, keys turned so that 64 of them are a matrix's outputs
         rows 0-5               scores, weights, and values weighted by these, in the core's caches
         rows 6-11              ...
       256-511                  ...

   A row is a head's query; the heads that share keys and values go over them together. All in float32, whatever comes in. What a position
   gets does not depend on the chunk it came in: blocks begin at the same keys for all. */

#include "chunk_tile.h"

typedef struct {
    const void *query, *keys, *values;
    void *out;
    int64_t query_stride, query_head_stride, key_stride, value_stride; /* from position to position, and from head to head */
    int heads, key_heads, width, positions, count, way;               /* width: a multiple of 64 */
    float scaling;
} chunk;

#ifdef __AVX512F__

#include <float.h>

enum { KEYS = 256, MOST_ROWS = 384 };

typedef struct {
    const chunk *of;
    int slabs, taken, threads; /* parts of the queries, of at most MOST_ROWS rows; those that were begun, and by how many */
    float *room;
    int64_t room_of_one;
} attending;

/* e^x of what is at most 0, as Cephes' expf has it (https://www.netlib.org/cephes/). */
static inline vector exponential(vector x) {
    __m512 at = _mm512_max_ps(_mm512_set1_ps(-87.0f), (__m512)x); /* which is x where that is no number */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(at, _mm512_set1_ps(1.44269504f)), 0);
    vector r = (vector)_mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), at);
    r = (vector)_mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), (__m512)r);
    vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return (vector)_mm512_scalef_ps((__m512)y, n);
}

static inline float read(const void *from, int64_t at, int way) {
    return way == FLOATS ? ((const float *)from)[at] : wide(((const bf16 *)from)[at]);
}

/* One row's scores of `seen` keys as weights; zero up to `used`. What was summed before is scaled with the greatest score. */
static void weigh(float *scores, int seen, int used, float *most, float *sum, float *found, int width) {
    vector greatest = (vector)_mm512_set1_ps(*most), total = {0};
    for (int at = 0; at < seen; at += VECTOR) {
        __mmask16 in = seen - at < VECTOR ? (__mmask16)((1u << (seen - at)) - 1u) : (__mmask16)0xffff;
        greatest = (vector)_mm512_mask_max_ps((__m512)greatest, in, (__m512)greatest, _mm512_loadu_ps(scores + at));
    }
    float now = _mm512_reduce_max_ps((__m512)greatest);
    for (int at = 0; at < used; at += VECTOR) {
        int left = seen - at < 0 ? 0 : seen - at;
        __mmask16 in = left < VECTOR ? (__mmask16)((1u << left) - 1u) : (__mmask16)0xffff;
        vector weight = exponential(*(const vector *)(scores + at) - now);
        weight = (vector)_mm512_maskz_mov_ps(in, (__m512)weight);
        *(vector *)(scores + at) = weight;
        total += weight;
    }
    if (now > *most) {
        vector scale = exponential(*most - now - (vector){0});
        *sum *= scale[0];
        for (int i = 0; i < width; i += VECTOR) *(vector *)(found + i) *= scale;
        *most = now;
    }
    *sum += _mm512_reduce_add_ps((__m512)total);
}

static inline void by_block(int rows, const float *x, int stride, const float *block, int entries, const float *from, int from_stride,
                            float *to, int to_stride) {
#define TILE(COUNT) \
    case COUNT: \
        tile(COUNT, FLOATS, (const char *)x, 4 * (int64_t)stride, (const char *)block, entries, from, from_stride, to, \
             to_stride, 0, 0); \
        break
    switch (rows) { TILE(1); TILE(2); TILE(3); TILE(4); TILE(5); TILE(6); }
#undef TILE
}

/* Keys from `start` on, [width][64] for each 64 of them, and values, [keys][64] for each 64 of the width; zeros behind the last. */
static void take_in(const chunk *at, int head, int start, float *keys, float *values) {
    int width = at->width, there = at->positions - start < KEYS ? at->positions - start : KEYS;
    int used = (there + COLUMN - 1) / COLUMN * COLUMN;
    for (int key = 0; key < used; key++) {
        int64_t own_key = head * at->key_stride + (int64_t)(start + key) * width;
        int64_t own_value = head * at->value_stride + (int64_t)(start + key) * width;
        float *turned = keys + (int64_t)(key / COLUMN) * COLUMN * width + key % COLUMN;
        for (int i = 0; i < width; i++) turned[(int64_t)i * COLUMN] = key < there ? read(at->keys, own_key + i, at->way) : 0.0f;
        for (int i = 0; i < width; i++)
            values[(int64_t)(i / COLUMN) * KEYS * COLUMN + (int64_t)key * COLUMN + i % COLUMN] =
                key < there ? read(at->values, own_value + i, at->way) : 0.0f;
    }
}

/* Queries [first, last) of the heads that share one head of keys. */
static void attend(const chunk *at, int head, int first, int last, float *room) {
    int width = at->width, sharing = at->heads / at->key_heads, rows = (last - first) * sharing;
    if (!rows) return; /* there are more parts than queries */
    int before = at->positions - at->count + first; /* keys that all of these see, but for their own */
    float *keys = room, *values = keys + (int64_t)KEYS * width, *scores = values + (int64_t)KEYS * width;
    float *query = scores + ROWS * KEYS, *found = query + (int64_t)MOST_ROWS * width, *most = found + (int64_t)MOST_ROWS * width;
    float *sum = most + MOST_ROWS;
    static const float nothing[COLUMN] __attribute__((aligned(LINE)));
    for (int row = 0; row < rows; row++) {
        int64_t from = (first + row / sharing) * at->query_stride + (head * sharing + row % sharing) * at->query_head_stride;
        for (int i = 0; i < width; i++) query[(int64_t)row * width + i] = read(at->query, from + i, at->way) * at->scaling;
        for (int i = 0; i < width; i++) found[(int64_t)row * width + i] = 0.0f;
        most[row] = -FLT_MAX / 2, sum[row] = 0.0f;
    }
    for (int start = 0; start < before + last - first; start += KEYS) {
        take_in(at, head, start, keys, values);
        for (int row = 0; row < rows; row += ROWS) {
            int count = rows - row < ROWS ? rows - row : ROWS;
            int seen = before + (row + count - 1) / sharing + 1 - start; /* by the last of them */
            if (seen <= 0) continue;
            seen = seen < KEYS ? seen : KEYS;
            int used = (seen + VECTOR - 1) / VECTOR * VECTOR;
            for (int key = 0; key < seen; key += COLUMN)
                by_block(count, query + (int64_t)row * width, width, keys + (int64_t)key * width, width, nothing, 0, scores + key, KEYS);
            for (int own = 0; own < count; own++) {
                int its = before + (row + own) / sharing + 1 - start;
                its = its < 0 ? 0 : its < seen ? its : seen;
                weigh(scores + own * KEYS, its, used, most + row + own, sum + row + own, found + (int64_t)(row + own) * width, width);
            }
            for (int i = 0; i < width; i += COLUMN) {
                float *own = found + (int64_t)row * width + i;
                by_block(count, scores, KEYS, values + (int64_t)i * KEYS, used, own, width, own, width);
            }
        }
    }
    for (int row = 0; row < rows; row++) {
        int64_t to = ((int64_t)(first + row / sharing) * at->heads + head * sharing + row % sharing) * width;
        vector share = 1.0f / sum[row] - (vector){0};
        for (int i = 0; i < width; i += VECTOR) {
            float out[VECTOR] __attribute__((aligned(LINE)));
            *(vector *)out = *(const vector *)(found + (int64_t)row * width + i) * share;
            if (at->way == FLOATS)
                memcpy((float *)at->out + to + i, out, sizeof out);
            else
                narrow(out, (bf16 *)at->out + to + i);
        }
    }
}

static void take_slabs(void *data) {
    attending *job = data;
    const chunk *at = job->of;
    float *room = job->room + __atomic_fetch_add(&job->threads, 1, __ATOMIC_RELAXED) * job->room_of_one;
    for (int task; (task = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED)) < job->slabs * at->key_heads;) {
        int slab = task % job->slabs;
        int first = (int)((int64_t)at->count * slab / job->slabs), last = (int)((int64_t)at->count * (slab + 1) / job->slabs);
        attend(at, task / job->slabs, first, last, room);
    }
}

int64_t meshnet_attend_chunk_room(int width) {
    return 2 * (int64_t)width * (KEYS + MOST_ROWS) + ROWS * KEYS + 2 * MOST_ROWS;
}

/* `room` is aligned to 64 bytes, and has what the function above says for each thread. */
void meshnet_attend_chunk(const chunk *at, float *room, int threads, parallel *run) {
    int together = MOST_ROWS / (at->heads / at->key_heads), slabs = (at->count + together - 1) / together;
    int wanted = (threads + at->key_heads - 1) / at->key_heads;
    attending job = {at, slabs > wanted ? slabs : wanted, 0, 0, room, meshnet_attend_chunk_room(at->width)};
    if (threads > 1)
        run(take_slabs, &job, (unsigned)threads, 0);
    else
        take_slabs(&job);
}

#else
int64_t meshnet_attend_chunk_room(int width) { return (void)width, 0; }
void meshnet_attend_chunk(const chunk *at, float *room, int threads, parallel *run) {
    (void)at, (void)room, (void)threads, (void)run;
}
#endif
