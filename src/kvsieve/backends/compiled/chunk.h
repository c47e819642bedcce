// One chunk of the listed tokens of a segment: logits, exponentials and the weighted sum of values, read in place.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "vectors.h"

namespace kvsieve {

struct Attention {
  int64_t batch, heads, group, width_k, width_v, page_size;
  const void* q;
  int64_t q_batch, q_head, q_group;  // strides; the last axis of q, K and V is dense
  const void *k, *v;                 // [heads, blocks, page_size, width]; a page is dense
  int64_t head_step, block_step;     // from one head or block to the next, in pages, in K and V alike
  const int64_t* table;  // [batch, pages]
  int64_t table_batch;
  const int64_t* pages;  // [batch, heads, listed], ascending
  int64_t pages_batch, pages_head;
  const int64_t *counts, *lengths;  // [batch]
  const float* sinks;               // [heads, group] or null
  void* out;                        // [batch, heads, group, width_v], dense
  float* lse;                       // [batch, heads, group]
  double scale, softcap;            // softcap 0: none
  float* mass;                      // [batch, heads, listed, page_size]: what the tokens received, or null
  int64_t listed, reduction;        // pages of the longest list; over the group: one of Reduction
};

enum Reduction : int64_t { SUM = 0, MEAN = 1, MAX = 2 };

constexpr int SHORT_CHUNK = 256, LONG_CHUNK = 1024, LONG_LIST = 16384, TILE = 32, HEADS_AT_ONCE = 4;

inline int64_t round_up(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

struct Unit {
  int64_t batch, head, first, last;  // listed tokens [first, last) of a segment
  int64_t kept;                      // where its exponentials are kept if mass is wanted, in floats

  int64_t tokens() const { return last - first; }
  int64_t stride() const { return round_up(tokens()) + LANES; }  // of a query head's logits
};

// Listed tokens of a segment: all pages are full but the last one of the list, if it is the request's last.
inline int64_t listed_tokens(const Attention& a, int64_t b, int64_t h) {
  const int64_t count = a.counts[b];
  if (count <= 0) return 0;
  const int64_t last = a.pages[b * a.pages_batch + h * a.pages_head + count - 1];
  const int64_t held = std::min(a.page_size, a.lengths[b] - last * a.page_size);
  return (count - 1) * a.page_size + std::max<int64_t>(0, held);
}

// The places of listed tokens [first, last) of a segment: rows of K and V, counted from the pool's first.
inline void find_rows(const Attention& a, const Unit& unit, int64_t* rows) {
  const int64_t p = a.page_size;
  const int64_t* pages = a.pages + unit.batch * a.pages_batch + unit.head * a.pages_head;
  const int64_t* table = a.table + unit.batch * a.table_batch;
  for (int64_t token = unit.first; token < unit.last;) {
    const int64_t offset = token % p, count = std::min(p - offset, unit.last - token);
    const int64_t start = (unit.head * a.head_step + table[pages[token / p]] * a.block_step) * p + offset;
    for (int64_t i = 0; i < count; ++i) *rows++ = start + i;
    token += count;
  }
}

// Pages lie anywhere, so the processor cannot guess the next one: rows are asked for this many bytes ahead.
constexpr int64_t AHEAD_BYTES = 4096, LINE = 64;

template <class T>
inline int64_t rows_ahead(int64_t width) {
  return std::max<int64_t>(4, AHEAD_BYTES / (int64_t)(width * sizeof(T)));
}

template <class T>
inline void prefetch(const T* row, int64_t width) {
  const char* from = (const char*)row;
  for (int64_t i = 0; i < (int64_t)(width * sizeof(T)); i += LINE) __builtin_prefetch(from + i, 0, 3);
}

// logits[g][0..TOKENS) = q[g] . k[rows[token]] for 1 or 4 tokens, q padded with zeros to whole vectors.
template <class T, int G, int TOKENS>
inline void dot_tokens(const float* q, int64_t padded, const T* k, const int64_t* rows, int64_t width, float* logits,
                       int64_t stride) {
  Floats sums[TOKENS][G];
  const T* keys[TOKENS];
#pragma GCC unroll 4
  for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) sums[t][g] = Floats{};
  for (int t = 0; t < TOKENS; ++t) keys[t] = k + rows[t] * width;
  for (int64_t d = 0; d < width; d += LANES) {
    const int64_t left = width - d;
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) {
      const Floats key = left < LANES ? load_part(keys[t] + d, (int)left) : load(keys[t] + d);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[t][g] += key * load(q + g * padded + d);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
    if constexpr (TOKENS == 4)
      sum_four(sums[0][g], sums[1][g], sums[2][g], sums[3][g], logits + g * stride);
    else
      logits[g * stride] = sum(sums[0][g]);
}

// sums[g][0..VECTORS * LANES) += weights[g][token] * v[rows[token]].
template <class T, int G, int VECTORS>
inline void add_columns(const float* weights, int64_t stride, const T* v, const int64_t* rows, int64_t width,
                        int64_t tokens, float* sums, int64_t padded) {
  Floats partial[G][VECTORS];
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < VECTORS; ++i) partial[g][i] = load(sums + g * padded + i * LANES);
  for (int64_t t = 0; t < tokens; ++t) {
    const T* from = v + rows[t] * width;
    Floats value[VECTORS];
    for (int i = 0; i < VECTORS; ++i) value[i] = load(from + i * LANES);
    for (int g = 0; g < G; ++g) {
      const Floats weight = fill(weights[g * stride + t]);
      for (int i = 0; i < VECTORS; ++i) partial[g][i] += weight * value[i];
    }
  }
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < VECTORS; ++i) store(sums + g * padded + i * LANES, partial[g][i]);
}

template <class T, int G>
inline void add_values(const float* weights, int64_t stride, const T* v, const int64_t* rows, int64_t width,
                       int64_t tokens, float* sums, int64_t padded) {
  int64_t d = 0;
  for (; d + 4 * LANES <= width; d += 4 * LANES)
    add_columns<T, G, 4>(weights, stride, v + d, rows, width, tokens, sums + d, padded);
  for (; d + LANES <= width; d += LANES)
    add_columns<T, G, 1>(weights, stride, v + d, rows, width, tokens, sums + d, padded);
  if (d == width) return;
  for (int64_t t = 0; t < tokens; ++t) {
    const Floats value = load_part(v + rows[t] * width + d, (int)(width - d));
    for (int g = 0; g < G; ++g) {
      float* to = sums + g * padded + d;
      store(to, load(to) + fill(weights[g * stride + t]) * value);
    }
  }
}

// Scaled, soft-capped logits become exponentials in place; returns their sum and the maximum that was taken off.
inline float exponentials(float* logits, int64_t tokens, const Attention& a, float* maximum) {
  const float scale = (float)a.scale, softcap = (float)a.softcap;
  for (int64_t t = tokens; t % LANES; ++t) logits[t] = -std::numeric_limits<float>::infinity();
  if (softcap > 0)
    for (int64_t t = 0; t < tokens; ++t) logits[t] = softcap * std::tanh(logits[t] * scale / softcap);
  Floats most = fill(-std::numeric_limits<float>::infinity());
  for (int64_t t = 0; t < tokens; t += LANES) {
    Floats x = load(logits + t);
    if (!(softcap > 0) && t + LANES <= tokens) store(logits + t, x = x * scale);
    if (!(softcap > 0) && t + LANES > tokens) {  // a negative scale must not turn the padding round
      for (int64_t i = t; i < tokens; ++i) logits[i] *= scale;
      x = load(logits + t);
    }
    most = x > most ? x : most;
  }
  float top = most[0];
  for (int i = 1; i < LANES; ++i) top = std::max(top, most[i]);
  *maximum = top;
  const float shift = top == -std::numeric_limits<float>::infinity() ? 0.0f : top;
  Floats total = {};
  for (int64_t t = 0; t < tokens; t += LANES) {
    const Floats e = exp_negative(load(logits + t) - shift);
    store(logits + t, e);
    total += e;
  }
  return sum(total);
}

// G query heads of one chunk of `tokens` rows: `maximum`, `total` [G], `sums` [G, padded_v].
template <class T, int G>
void attend_heads(const Attention& a, const int64_t* rows, int64_t tokens, const float* q, int64_t padded_k,
                  float* logits, int64_t stride, float* maximum, float* total, float* sums, int64_t padded_v) {
  const T *k = (const T*)a.k, *v = (const T*)a.v;
  const int64_t ahead = rows_ahead<T>(a.width_k), ahead_v = rows_ahead<T>(a.width_v);
  int64_t t = 0;
  for (; t + 4 <= tokens; t += 4) {
    for (int64_t i = t + ahead; i < t + ahead + 4; ++i)
      if (i < tokens)
        prefetch(k + rows[i] * a.width_k, a.width_k);
      else if (i - tokens < ahead_v)
        prefetch(v + rows[std::min(i - tokens, tokens - 1)] * a.width_v, a.width_v);
    dot_tokens<T, G, 4>(q, padded_k, k, rows + t, a.width_k, logits + t, stride);
  }
  for (; t < tokens; ++t) dot_tokens<T, G, 1>(q, padded_k, k, rows + t, a.width_k, logits + t, stride);
  for (int g = 0; g < G; ++g) total[g] = exponentials(logits + g * stride, tokens, a, maximum + g);
  std::fill(sums, sums + G * padded_v, 0.0f);
  for (t = 0; t < tokens; t += TILE) {
    const int64_t count = std::min<int64_t>(TILE, tokens - t);
    for (int64_t i = t + ahead_v; i < std::min(t + ahead_v + TILE, tokens); ++i)
      prefetch(v + rows[i] * a.width_v, a.width_v);
    add_values<T, G>(logits + t, stride, v, rows + t, a.width_v, count, sums, padded_v);
  }
}

// `kept` [group, stride]: where exponentials stay; null: in scratch, until the next heads.
template <class T>
void attend_unit(const Attention& a, const Unit& unit, std::vector<float>& scratch, float* partial, float* kept) {
  int64_t rows[LONG_CHUNK];
  const int64_t tokens = unit.tokens(), stride = unit.stride();
  find_rows(a, unit, rows);
  const int64_t padded_k = round_up(a.width_k), padded_v = round_up(a.width_v);
  scratch.resize(HEADS_AT_ONCE * (padded_k + stride) + LANES);
  float* const aligned = (float*)(((uintptr_t)scratch.data() + 63) & ~(uintptr_t)63);
  float *q = aligned, *logits = q + HEADS_AT_ONCE * padded_k;
  float *maximum = partial, *total = maximum + a.group, *sums = total + a.group;
  const T* queries = (const T*)a.q + unit.batch * a.q_batch + unit.head * a.q_head;
  for (int64_t g = 0; g < a.group; g += HEADS_AT_ONCE) {
    const int64_t heads = std::min<int64_t>(HEADS_AT_ONCE, a.group - g);
    for (int64_t i = 0; i < heads; ++i)
      for (int64_t d = 0; d < padded_k; d += LANES) {
        const int64_t left = a.width_k - d;
        const T* from = queries + (g + i) * a.q_group + d;
        store(q + i * padded_k + d, left < LANES ? load_part(from, (int)left) : load(from));
      }
    auto run = heads == 4   ? attend_heads<T, 4>
               : heads == 3 ? attend_heads<T, 3>
               : heads == 2 ? attend_heads<T, 2>
                            : attend_heads<T, 1>;
    float* const to = kept ? kept + g * stride : logits;
    run(a, rows, tokens, q, padded_k, to, stride, maximum + g, total + g, sums + g * padded_v, padded_v);
  }
}

}  // namespace kvsieve
