// Exact attention of one query token per request over listed pages, read in place.
//
// The listed tokens of a segment are cut into chunks; a chunk is a unit of work and its size depends on the number of
// tokens alone, so results do not depend on threads or on what else is in the batch. Each chunk gives a maximum, a sum
// of exponentials and a weighted sum of values; the chunks of a segment are merged in order.
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
  const void *k, *v;                 // [heads, blocks, page_size, width], dense
  int64_t blocks;
  const int64_t* table;  // [batch, pages]
  int64_t table_batch;
  const int64_t* pages;  // [batch, heads, listed], ascending
  int64_t pages_batch, pages_head;
  const int64_t *counts, *lengths;  // [batch]
  const float* sinks;               // [heads, group] or null
  void* out;                        // [batch, heads, group, width_v], dense
  float* lse;                       // [batch, heads, group]
  double scale, softcap;            // softcap 0: none
};

constexpr int SHORT_CHUNK = 256, LONG_CHUNK = 1024, LONG_LIST = 16384, TILE = 64, HEADS_AT_ONCE = 4;

struct Unit {
  int64_t batch, head, first, last;  // listed tokens [first, last) of a segment
};

// Listed tokens of a segment: all pages are full but the last one of the list, if it is the request's last.
inline int64_t listed_tokens(const Attention& a, int64_t b, int64_t h) {
  const int64_t count = a.counts[b];
  if (count <= 0) return 0;
  const int64_t last = a.pages[b * a.pages_batch + h * a.pages_head + count - 1];
  const int64_t held = std::min(a.page_size, a.lengths[b] - last * a.page_size);
  return (count - 1) * a.page_size + std::max<int64_t>(0, held);
}

// Calls visit(first token of the pool, count) for runs of listed tokens that are consecutive in memory.
template <class Visit>
inline void for_runs(const Attention& a, const Unit& unit, Visit visit) {
  const int64_t p = a.page_size;
  const int64_t* pages = a.pages + unit.batch * a.pages_batch + unit.head * a.pages_head;
  const int64_t* table = a.table + unit.batch * a.table_batch;
  for (int64_t token = unit.first; token < unit.last;) {
    const int64_t offset = token % p;
    int64_t page = token / p, block = table[pages[page]];
    const int64_t start = (unit.head * a.blocks + block) * p + offset;
    int64_t count = std::min(p - offset, unit.last - token);
    while (token + count < unit.last && table[pages[page + 1]] == block + 1) {
      ++page, ++block;
      count += std::min(p, unit.last - token - count);
    }
    visit(start, token - unit.first, count);
    token += count;
  }
}

// logits[g][0..tokens) = q[g] . k[token], q padded with zeros to whole vectors.
template <class T, int G, int TOKENS>
inline void dot_tokens(const float* q, int64_t padded, const T* k, int64_t width, float* logits, int64_t stride) {
  Floats sums[TOKENS][G] = {};
  const int64_t whole = width / LANES * LANES;
  for (int64_t d = 0; d < whole; d += LANES) {
    Floats heads[G];
    for (int g = 0; g < G; ++g) heads[g] = load(q + g * padded + d);
    for (int t = 0; t < TOKENS; ++t) {
      const Floats key = load(k + t * width + d);
      for (int g = 0; g < G; ++g) sums[t][g] += key * heads[g];
    }
  }
  if (whole < width)
    for (int t = 0; t < TOKENS; ++t) {
      const Floats key = load_part(k + t * width + whole, (int)(width - whole));
      for (int g = 0; g < G; ++g) sums[t][g] += key * load(q + g * padded + whole);
    }
  for (int t = 0; t < TOKENS; ++t)
    for (int g = 0; g < G; ++g) logits[g * stride + t] = sum(sums[t][g]);
}

// sums[g][0..width) += weights[g][token] * v[token].
template <class T, int G, int VECTORS>
inline void add_columns(const float* weights, int64_t stride, const T* v, int64_t width, int64_t tokens, float* sums,
                        int64_t padded) {
  Floats partial[G][VECTORS];
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < VECTORS; ++i) partial[g][i] = load(sums + g * padded + i * LANES);
  for (int64_t t = 0; t < tokens; ++t) {
    Floats value[VECTORS];
    for (int i = 0; i < VECTORS; ++i) value[i] = load(v + t * width + i * LANES);
    for (int g = 0; g < G; ++g) {
      const Floats weight = fill(weights[g * stride + t]);
      for (int i = 0; i < VECTORS; ++i) partial[g][i] += weight * value[i];
    }
  }
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < VECTORS; ++i) store(sums + g * padded + i * LANES, partial[g][i]);
}

template <class T, int G>
inline void add_values(const float* weights, int64_t stride, const T* v, int64_t width, int64_t tokens, float* sums,
                       int64_t padded) {
  int64_t d = 0;
  for (; d + 4 * LANES <= width; d += 4 * LANES)
    add_columns<T, G, 4>(weights, stride, v + d, width, tokens, sums + d, padded);
  for (; d + LANES <= width; d += LANES)
    add_columns<T, G, 1>(weights, stride, v + d, width, tokens, sums + d, padded);
  if (d == width) return;
  for (int64_t t = 0; t < tokens; ++t) {
    const Floats value = load_part(v + t * width + d, (int)(width - d));
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

// G query heads of one chunk: `maximum`, `total` [G], `sums` [G, padded_v].
template <class T, int G>
void attend_heads(const Attention& a, const Unit& unit, const float* q, int64_t padded_k, float* logits, int64_t stride,
                  float* maximum, float* total, float* sums, int64_t padded_v) {
  for_runs(a, unit, [&](int64_t start, int64_t place, int64_t count) {
    const T* k = (const T*)a.k + start * a.width_k;
    int64_t t = 0;
    for (; t + 4 <= count; t += 4)
      dot_tokens<T, G, 4>(q, padded_k, k + t * a.width_k, a.width_k, logits + place + t, stride);
    for (; t < count; ++t)
      dot_tokens<T, G, 1>(q, padded_k, k + t * a.width_k, a.width_k, logits + place + t, stride);
  });
  for (int g = 0; g < G; ++g) total[g] = exponentials(logits + g * stride, unit.last - unit.first, a, maximum + g);
  std::fill(sums, sums + G * padded_v, 0.0f);
  for_runs(a, unit, [&](int64_t start, int64_t place, int64_t count) {
    for (int64_t t = 0; t < count; t += TILE)
      add_values<T, G>(logits + place + t, stride, (const T*)a.v + (start + t) * a.width_v, a.width_v,
                       std::min<int64_t>(TILE, count - t), sums, padded_v);
  });
}

template <class T>
void attend_unit(const Attention& a, const Unit& unit, std::vector<float>& scratch, float* partial) {
  const int64_t padded_k = (a.width_k + LANES - 1) / LANES * LANES;
  const int64_t padded_v = (a.width_v + LANES - 1) / LANES * LANES;
  const int64_t stride = LONG_CHUNK + LANES;
  scratch.resize(HEADS_AT_ONCE * (padded_k + stride));
  float *q = scratch.data(), *logits = q + HEADS_AT_ONCE * padded_k;
  float *maximum = partial, *total = maximum + a.group, *sums = total + a.group;
  const T* rows = (const T*)a.q + unit.batch * a.q_batch + unit.head * a.q_head;
  for (int64_t g = 0; g < a.group; g += HEADS_AT_ONCE) {
    const int64_t heads = std::min<int64_t>(HEADS_AT_ONCE, a.group - g);
    for (int64_t i = 0; i < heads; ++i)
      for (int64_t d = 0; d < padded_k; d += LANES) {
        const int64_t left = a.width_k - d;
        const T* from = rows + (g + i) * a.q_group + d;
        store(q + i * padded_k + d, left < LANES ? load_part(from, (int)left) : load(from));
      }
    auto run = heads == 4   ? attend_heads<T, 4>
               : heads == 3 ? attend_heads<T, 3>
               : heads == 2 ? attend_heads<T, 2>
                            : attend_heads<T, 1>;
    run(a, unit, q, padded_k, logits, stride, maximum + g, total + g, sums + g * padded_v, padded_v);
  }
}

// Merges the chunks [first, last) of a segment, and its sink logit, into out and lse.
template <class T>
void merge(const Attention& a, int64_t b, int64_t h, const float* partials, int64_t size, int64_t first, int64_t last) {
  const int64_t padded_v = (a.width_v + LANES - 1) / LANES * LANES;
  const float nothing = -std::numeric_limits<float>::infinity();
  std::vector<float> sums(padded_v);
  for (int64_t g = 0; g < a.group; ++g) {
    const float sink = a.sinks ? a.sinks[h * a.group + g] : nothing;
    float top = sink;
    for (int64_t c = first; c < last; ++c) top = std::max(top, partials[c * size + g]);
    const float shift = top == nothing ? 0.0f : top;
    float total = sink == nothing ? 0.0f : std::exp(sink - shift);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t c = first; c < last; ++c) {
      const float* part = partials + c * size;
      const float weight = std::exp(part[g] - shift);
      total += weight * part[a.group + g];
      const float* from = part + 2 * a.group + g * padded_v;
      for (int64_t d = 0; d < padded_v; ++d) sums[d] += weight * from[d];
    }
    const int64_t row = (b * a.heads + h) * a.group + g;
    a.lse[row] = shift + std::log(total);
    for (int64_t d = 0; d < a.width_v; ++d) put((T*)a.out + row * a.width_v + d, sums[d] / total);
  }
}

// Returns the number of K/V tokens read.
template <class T>
int64_t attend(const Attention& a) {
  const int64_t padded_v = (a.width_v + LANES - 1) / LANES * LANES;
  const int64_t size = a.group * (2 + padded_v), segments = a.batch * a.heads;
  std::vector<Unit> units;
  std::vector<int64_t> first(segments + 1);
  int64_t read = 0;
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t tokens = listed_tokens(a, s / a.heads, s % a.heads);
    const int64_t chunk = tokens <= LONG_LIST ? SHORT_CHUNK : LONG_CHUNK;
    first[s] = (int64_t)units.size();
    for (int64_t t = 0; t < tokens; t += chunk)
      units.push_back({s / a.heads, s % a.heads, t, std::min(t + chunk, tokens)});
    read += tokens;
  }
  first[segments] = (int64_t)units.size();
  static thread_local std::vector<float> partials;
  partials.resize(std::max(partials.size(), units.size() * (size_t)size));
  float* const partial = partials.data();
  const int64_t work = (int64_t)units.size();
#pragma omp parallel if (work > 1)
  {
    std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t u = 0; u < work; ++u) attend_unit<T>(a, units[u], scratch, partial + u * size);
#pragma omp for schedule(static)
    for (int64_t s = 0; s < segments; ++s)
      merge<T>(a, s / a.heads, s % a.heads, partial, size, first[s], first[s + 1]);
  }
  return read;
}

}  // namespace kvsieve
