/* The small operations of a decode step, and experts' products, for rows of one position each, in bfloat16.

   Every sum is made in float32 and every result rounded where transformers' modules round it, so that norms, sums and gates
   have their bits; what sums more may round to a neighbour. A row's work fits into a core's caches, but for experts' weights,
   which are read as quickly by one thread as memory gives them; so one thread does it. Built and called by step_kernels.py, which says what the arguments are. */

#include "row_values.h"
#include "few_rows.h"

enum { MOST_WIDTH = 512 };

#define REAL bf16
#define OF(name) name
#define WIDE wide
#define NARROW narrow
#include "row_ops.h"

void meshnet_norm(const bf16 *x, const bf16 *weight, bf16 *out, int rows, int width, float eps) {
    for (int row = 0; row < rows; row++, x += width, out += width) norm_row(x, weight, out, width, eps);
}

void meshnet_add(bf16 *x, const bf16 *other, int count) { add_row(x, other, count); }

void meshnet_add_norm(bf16 *x, const bf16 *other, const bf16 *weight, bf16 *out, int rows, int width, float eps) {
    meshnet_add(x, other, rows * width);
    meshnet_norm(x, weight, out, rows, width, eps);
}

void meshnet_silu_mul(const bf16 *gate_up, bf16 *out, int rows, int width) {
    for (int row = 0; row < rows; row++, gate_up += 2 * width, out += width)
        silu_mul_row(gate_up, gate_up + width, out, width);
}

typedef struct {
    const bf16 *conv; /* [2 * key_heads * key_width + heads * width, taps] */
    const float *rate, *step_bias; /* [heads] */
    const bf16 *norm; /* [width] */
    int heads, key_heads, width, key_width, taps;
    float eps;
} delta;

enum { MOST_DELTA = 128 }; /* columns of a state that are taken at once: as many as fit into a core's registers */

/* The newest column of a short convolution over what was kept of those before it, which moves on by one. */
static void convolve(const delta *at, bf16 *kept, const bf16 *newest, float *out, int channels) {
    int taps = at->taps;
    for (int channel = 0; channel < channels; channel++, kept += taps) {
        const bf16 *weight = at->conv + (int64_t)channel * taps;
        float sum = 0.0f;
        for (int tap = 0; tap + 1 < taps; tap++) {
            kept[tap] = kept[tap + 1];
            sum += wide(kept[tap]) * wide(weight[tap]);
        }
        kept[taps - 1] = newest[channel];
        out[channel] = rounded(sum + wide(newest[channel]) * wide(weight[taps - 1]));
    }
    for (int channel = 0; channel < channels; channel++) out[channel] = rounded(silu(out[channel]));
}

static void to_unit(float *x, int width, float scale) {
    float sum = 0.0f;
    for (int i = 0; i < width; i++) sum += x[i] * x[i];
    scale /= sqrtf(sum + 1e-6f);
    for (int i = 0; i < width; i++) x[i] *= scale;
}

/* `count` columns of one head's state, [key_width, width]: it fades, takes in what its answer to the key lacks of the value,
   and is asked with the query. Read from memory once; `count` is a constant where it has to be quick. */
static inline __attribute__((always_inline)) void renew(const int count, float *state, int64_t width, const float *key,
                                                         const float *query, const float *value, int key_width,
                                                         float fade, float beta, float *found) {
    float change[MOST_DELTA], asked[MOST_DELTA];
    for (int i = 0; i < count; i++) change[i] = 0.0f, asked[i] = 0.0f;
    for (int at = 0; at < key_width; at++) {
        const float *row = state + at * width;
        for (int i = 0; i < count; i++) change[i] += row[i] * key[at];
    }
    for (int i = 0; i < count; i++) change[i] = (value[i] - fade * change[i]) * beta;
    for (int at = 0; at < key_width; at++) {
        float *row = state + at * width;
        for (int i = 0; i < count; i++) {
            row[i] = row[i] * fade + change[i] * key[at];
            asked[i] += row[i] * query[at];
        }
    }
    for (int i = 0; i < count; i++) found[i] = asked[i];
}

static void gated_norm(const delta *at, float *found, const bf16 *gate, bf16 *out) {
    float sum = 0.0f;
    for (int i = 0; i < at->width; i++) found[i] = rounded(found[i]), sum += found[i] * found[i];
    float scale = 1.0f / sqrtf(sum / (float)at->width + at->eps);
    for (int i = 0; i < at->width; i++)
        out[i] = narrow(rounded(rounded(found[i] * scale) * wide(at->norm[i])) * silu(wide(gate[i])));
}

/* Positions of several sessions, those of one in order, through a gated delta rule, from its projections to what goes out of it.
   `kept` has two addresses a row: of the columns that the convolution sees, and of the state. */
void meshnet_delta(const delta *at, int rows, const int64_t *kept, const bf16 *mixed, const bf16 *gate, const bf16 *beta,
                   const bf16 *step, float *room, bf16 *out) {
    int keys = at->key_heads * at->key_width, values = at->heads * at->width, channels = 2 * keys + values;
    for (int row = 0; row < rows; row++, mixed += channels, gate += values, beta += at->heads, step += at->heads) {
        float *state = (float *)(intptr_t)kept[2 * row + 1];
        convolve(at, (bf16 *)(intptr_t)kept[2 * row], mixed, room, channels);
        for (int head = 0; head < at->key_heads; head++) {
            to_unit(room + head * at->key_width, at->key_width, 1.0f / sqrtf((float)at->key_width));
            to_unit(room + keys + head * at->key_width, at->key_width, 1.0f);
        }
        for (int head = 0; head < at->heads; head++, out += at->width) {
            int64_t asking = (int64_t)(head / (at->heads / at->key_heads)) * at->key_width;
            float x = wide(step[head]) + at->step_bias[head];
            float fade = expf(at->rate[head] * (x > 20.0f ? x : log1pf(expf(x))));
            float share = rounded(1.0f / (1.0f + expf(-wide(beta[head]))));
            float found[MOST_WIDTH], *value = room + 2 * keys + (int64_t)head * at->width;
            float *own = state + (int64_t)head * at->key_width * at->width;
            for (int from = 0, count; from < at->width; from += count) {
                count = at->width - from < MOST_DELTA ? at->width - from : MOST_DELTA;
#define RENEW(COUNT) \
    renew(COUNT, own + from, at->width, room + keys + asking, room + asking, value + from, at->key_width, fade, share, \
          found + from)
                switch (count) {
                case 128: RENEW(128); break;
                case 64: RENEW(64); break;
                default: RENEW(count);
                }
            }
            gated_norm(at, found, gate + (int64_t)head * at->width, out);
        }
    }
}

static void products(int count, const bf16 *matrix, const bf16 *const *inputs, int in, int out, bf16 *const *outputs) {
    for (int from = 0; from < out; from += COLUMN) {
        bf16 *some[FEW];
        for (int row = 0; row < count; row++) some[row] = outputs[row] + from;
        few_rows(count, matrix + (int64_t)from * in, 0, inputs, in, some);
    }
}

typedef struct {
    const int64_t *gate_up, *down; /* addresses of each expert's matrices, in columns */
    int experts, chosen, hidden, inner, rounds;
} mixture;

/* What each row's chosen experts make of it, weighted and added up; an expert beyond the last gives nothing. `room` has
   FEW rows of 2 * inner + hidden, `made` rows * chosen of hidden. Weighted, it is rounded where the weights were. */
void meshnet_experts(const mixture *at, int rows, const bf16 *x, const int64_t *chosen, const float *weights, bf16 *room,
                     float *made, bf16 *out) {
    int hidden = at->hidden, inner = at->inner, places = rows * at->chosen;
    memset(made, 0, (size_t)places * (size_t)hidden * sizeof(float));
    for (int expert = 0; expert < at->experts; expert++) {
        for (int place = 0; place < places;) {
            const bf16 *given[FEW], *gated[FEW];
            bf16 *both[FEW], *results[FEW];
            int places_of[FEW], count = 0;
            for (; place < places && count < FEW; place++) {
                if (chosen[place] != expert) continue;
                given[count] = x + (int64_t)(place / at->chosen) * hidden;
                gated[count] = both[count] = room + (int64_t)count * (2 * inner + hidden);
                results[count] = both[count] + 2 * inner;
                places_of[count++] = place;
            }
            if (!count) break;
            products(count, (const bf16 *)(intptr_t)at->gate_up[expert], given, hidden, 2 * inner, both);
            for (int row = 0; row < count; row++) meshnet_silu_mul(both[row], both[row], 1, inner);
            products(count, (const bf16 *)(intptr_t)at->down[expert], gated, inner, hidden, results);
            for (int row = 0; row < count; row++) {
                float weight = weights[places_of[row]], *own = made + (int64_t)places_of[row] * hidden;
                for (int i = 0; i < hidden; i++) own[i] = wide(results[row][i]) * weight;
                if (at->rounds)
                    for (int i = 0; i < hidden; i++) own[i] = rounded(own[i]);
            }
        }
    }
    for (int row = 0; row < rows; row++, out += hidden, made += (int64_t)at->chosen * hidden) {
        for (int place = 1; place < at->chosen; place++)
            for (int i = 0; i < hidden; i++) made[i] += made[(int64_t)place * hidden + i];
        for (int i = 0; i < hidden; i++) out[i] = narrow(made[i]);
    }
}

/* One row of a packed 4-bit matrix (packed_matrix.py has the layout): `byte` and `shift` say where its codes are. */
void meshnet_take(const uint8_t *codes, const bf16 *scales, bf16 *out, int groups, int planes, int half, int byte,
                  int shift, int64_t stride) {
    enum { GROUP = 32 };
    for (int group = 0; group < groups; group++, scales += stride, out += GROUP) {
        float scale = wide(scales[0]), zero = wide(scales[1]);
        const uint8_t *high = codes + (int64_t)group * planes * GROUP * half + byte, *low = high + GROUP * half;
        for (int i = 0; i < GROUP; i++) {
            float code = (float)((high[i * half] >> shift) & 15);
            if (planes == 2) code = code * 16.0f + (float)((low[i * half] >> shift) & 15);
            out[i] = narrow(planes == 2 ? (code - 128.0f) * scale : (code - 8.0f) * scale + zero);
        }
    }
}
