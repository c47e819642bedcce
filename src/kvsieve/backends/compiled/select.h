// Exact page selection: higher score first, -0 equals +0, NaN below -inf, the older page at equal rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

namespace kvsieve {

struct Choice {
  int64_t batch, heads, sink, recent, width;
  const int64_t *pages, *counts;  // [batch]: pages of each request, and how many of them it attends
  const float* scores;            // [scored, heads, window] or null; the last axis is dense
  int64_t scores_batch, scores_head, scored;
  const int64_t* requests;  // [scored]: places in the batch
  int64_t* out;             // [batch, heads, width]
};

inline uint32_t order_key(float score) {
  uint32_t bits;
  score += 0.0f;  // -0 becomes +0
  std::memcpy(&bits, &score, sizeof bits);
  const uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return score != score ? 0 : key;
}

// The smallest key among the `count` greatest, and how many of those equal it. 0 < count <= size.
inline uint32_t threshold(const std::vector<uint32_t>& keys, int64_t count, std::vector<uint32_t>& candidates,
                          int64_t* equal) {
  constexpr int SHIFT = 20, BINS = 1 << (32 - SHIFT);
  candidates.clear();
  int64_t greater = 0;  // keys above all candidates
  if (keys.size() <= 512) {
    candidates = keys;
  } else {
    static thread_local uint32_t bins[BINS];
    std::memset(bins, 0, sizeof bins);
    for (uint32_t key : keys) ++bins[key >> SHIFT];
    uint32_t bin = BINS - 1;
    while (greater + bins[bin] < count) greater += bins[bin--];
    candidates.reserve(bins[bin]);
    for (uint32_t key : keys)
      if (key >> SHIFT == bin) candidates.push_back(key);
  }
  const auto place = candidates.begin() + (count - greater - 1);
  std::nth_element(candidates.begin(), place, candidates.end(), std::greater<uint32_t>());
  const uint32_t least = *place;
  *equal = count - greater - std::count_if(candidates.begin(), place, [&](uint32_t key) { return key > least; });
  return least;
}

// The `count` best of `scores[0..size)`, ascending, each plus `offset`.
inline int64_t* best(const float* scores, int64_t size, int64_t count, int64_t offset, int64_t* out) {
  static thread_local std::vector<uint32_t> keys, candidates;
  keys.resize(size);
  for (int64_t i = 0; i < size; ++i) keys[i] = order_key(scores[i]);
  int64_t equal = 0;
  const uint32_t least = threshold(keys, count, candidates, &equal);
  for (int64_t i = 0; i < size; ++i)
    if (keys[i] > least || (keys[i] == least && equal-- > 0)) *out++ = i + offset;
  return out;
}

inline int64_t* ascending(int64_t first, int64_t last, int64_t* out) {
  for (int64_t i = first; i < last; ++i) *out++ = i;
  return out;
}

inline void select_segment(const Choice& c, int64_t b, int64_t h, const float* scores) {
  int64_t *out = c.out + (b * c.heads + h) * c.width, *const end = out + c.width;
  const int64_t pages = c.pages[b], count = c.counts[b], chosen = count - c.sink - c.recent;
  if (pages == count) {
    out = ascending(0, pages, out);
  } else {
    out = ascending(0, c.sink, out);
    if (chosen > 0) out = best(scores, pages - c.sink - c.recent, chosen, c.sink, out);
    out = ascending(pages - c.recent, pages, out);
  }
  std::fill(out, end, 0);
}

inline void select(const Choice& c) {
  std::vector<const float*> rows(c.batch, nullptr);
  for (int64_t i = 0; i < c.scored; ++i) rows[c.requests[i]] = c.scores + i * c.scores_batch;
  const int64_t segments = c.batch * c.heads;
  int64_t ranked = 0;  // scores to look at: few are sooner done than shared out
  for (int64_t i = 0; i < c.scored; ++i) ranked += c.heads * c.pages[c.requests[i]];
#pragma omp parallel for schedule(dynamic, 1) if (segments > 1 && ranked > 1 << 13)
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t b = s / c.heads, h = s % c.heads;
    select_segment(c, b, h, rows[b] ? rows[b] + h * c.scores_head : nullptr);
  }
}

}  // namespace kvsieve
