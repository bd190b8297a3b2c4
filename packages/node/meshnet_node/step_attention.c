/* Attention of one position, in bfloat16: softmax over its scores of the keys before it, and the values weighted by it. Queries and keys are
   rounded where transformers' modules round them; scores, weights and sums are float32, where weights are rounded there.

       positions 0-255     scores of each head, weights by the greatest of these, their sum, and values weighted so
       256-511             ...
       all                 put together by the greatest of all (https://arxiv.org/abs/2307.08691)

   Blocks begin at the same positions whoever takes them, so that what comes out hangs on no number of threads. Built and called by
   step_kernels.py, which says what the arguments are. */

#include "parallel.h"
#include "row_values.h"
#include "step_attention.h"

#define REAL bf16
#define OF(name) name
#define WIDE wide
#define NARROW narrow
#include "row_ops.h"

/* Scores become weights by the greatest of them: that and their sum. */
static void weigh(float *scores, int positions, float *stats) {
    float lanes[LANES], most = -INFINITY, sum = 0.0f;
    int whole = positions / LANES * LANES;
    for (int i = 0; i < LANES; i++) lanes[i] = -INFINITY; /* in lanes, since no compiler may reorder a maximum */
    for (int at = 0; at < whole; at += LANES)
        for (int i = 0; i < LANES; i++) lanes[i] = scores[at + i] > lanes[i] ? scores[at + i] : lanes[i];
    for (int at = whole; at < positions; at++) most = scores[at] > most ? scores[at] : most;
    for (int i = 0; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
    float from = most == -INFINITY ? 0.0f : most; /* where none of the block counts */
    for (int at = 0; at < positions; at++) {
        scores[at] = exponential(scores[at] - from);
        sum += scores[at];
    }
    stats[0] = most, stats[1] = sum;
}

/* `count` heads that share keys and values, of one block. What is read of a position is widened once for all of them. Both numbers are
   constants where it has to be quick: the loops are unrolled then. */
static inline __attribute__((always_inline)) void attend_heads(const int count, const int width, const bf16 *query, const bf16 *keys,
                                                                const bf16 *values, int positions, float scaling, float *stats,
                                                                float *out) {
    halves asked, found;
    weights scores;
    for (int head = 0; head < count; head++)
        for (int i = 0; i < width; i++) asked[head][i % 2][i / 2] = wide(query[head * width + i]) * scaling;
    if (IS_WIDE(width))
        score_wide(count, width, asked, keys, values, positions, scores);
    else
        score(count, width, asked, keys, values, positions, scores);
    for (int head = 0; head < count; head++) weigh(scores[head], positions, stats + 2 * head);
    if (IS_WIDE(width))
        collect_wide(count, width, scores, values, positions, found);
    else
        collect(count, width, scores, values, positions, found);
    for (int head = 0; head < count; head++)
        for (int i = 0; i < width; i++) out[head * width + i] = found[head][i % 2][i / 2];
}

typedef struct {
    const attention *of;
    const bf16 *query, *keys, *values;
    int64_t key_stride, value_stride;
    int positions, blocks, taken; /* blocks of each head of keys; how many were begun */
    float *found, *stats;         /* [blocks, heads, width], [blocks, heads, 2] */
} attending;

static void attend_block(const attending *job, int key_head, int block) {
    const attention *at = job->of;
    int width = at->width, sharing = at->heads / at->key_heads, left = job->positions - block * BLOCK;
    int positions = left < BLOCK ? left : BLOCK;
    int64_t start = (int64_t)block * BLOCK * width;
    const bf16 *keys = job->keys + key_head * job->key_stride + start;
    const bf16 *values = job->values + key_head * job->value_stride + start;
    for (int head = key_head * sharing, end = head + sharing, count; head < end; head += count) {
        count = end - head < MOST_HEADS ? end - head : MOST_HEADS;
        const bf16 *query = job->query + (int64_t)head * width;
        float *stats = job->stats + 2 * ((int64_t)block * at->heads + head);
        float *found = job->found + ((int64_t)block * at->heads + head) * width;
#define ATTEND(COUNT, WIDTH) attend_heads(COUNT, WIDTH, query, keys, values, positions, at->scaling, stats, found)
#define ATTEND_OF(WIDTH) \
    switch (count) { \
    case 1: ATTEND(1, WIDTH); break; \
    case 2: ATTEND(2, WIDTH); break; \
    case 3: ATTEND(3, WIDTH); break; \
    default: ATTEND(4, WIDTH); \
    }
        switch (width) {
        case 64: ATTEND_OF(64) break;
        case 128: ATTEND_OF(128) break;
        default: ATTEND_OF(width)
        }
    }
}

static void take_blocks(void *data) {
    attending *job = data;
    int all = job->blocks * job->of->key_heads;
    for (int task; (task = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED)) < all;)
        attend_block(job, task / job->blocks, task % job->blocks);
}

static void put_together(const attending *job, bf16 *out) {
    int width = job->of->width, heads = job->of->heads;
    for (int head = 0; head < heads; head++, out += width) {
        float most = -INFINITY, sum = 0.0f, all[MOST_WIDTH];
        for (int block = 0; block < job->blocks; block++) {
            float its = job->stats[2 * (block * heads + head)];
            most = its > most ? its : most;
        }
        for (int i = 0; i < width; i++) all[i] = 0.0f;
        for (int block = 0; block < job->blocks; block++) {
            int64_t place = (int64_t)block * heads + head;
            const float *stats = job->stats + 2 * place, *found = job->found + place * width;
            float scale = exponential(stats[0] - most);
            sum += scale * stats[1];
            for (int i = 0; i < width; i++) all[i] += scale * found[i];
        }
        for (int i = 0; i < width; i++) out[i] = narrow(all[i] / sum);
    }
}

/* `room`: [blocks, heads, width + 2]. */
void meshnet_attend(const attention *at, bf16 *qkv, const bf16 *cosines, const bf16 *sines, bf16 *keys, bf16 *values,
                    int64_t key_stride, int64_t value_stride, int positions, float *room, bf16 *out, int threads, parallel *run) {
    take_in(at, qkv, cosines, sines, keys, values, key_stride, value_stride, positions);
    if (!out) return;
    int blocks = (positions + BLOCK - 1) / BLOCK;
    float *stats = room + (int64_t)blocks * at->heads * at->width;
    attending job = {at, qkv, keys, values, key_stride, value_stride, positions, blocks, 0, room, stats};
    if (threads > 1)
        run(take_blocks, &job, (unsigned)threads, 0);
    else
        take_blocks(&job);
    put_together(&job, out);
}
