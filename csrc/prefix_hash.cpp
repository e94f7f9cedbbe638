// The chained hashes of a prompt's blocks: SHA-256 of what Python's pickle makes of
// (parent's hash, the block's tokens, None), see vllm/v1/core/kv_cache_utils.py.
#include <cstring>
#include <new>
#include <vector>

#include "vllm_native.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace {

constexpr int kHashBytes = 32;
constexpr int kChunkBytes = 64;

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr uint32_t kStart[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

inline uint32_t turn(uint32_t x, int by) { return x >> by | x << (32 - by); }

inline uint32_t load_big_endian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | p[3];
}

// Takes whole chunks of a message into the state.
void digest_chunks(uint32_t* state, const uint8_t* data, int64_t num_chunks) {
  for (; num_chunks > 0; --num_chunks, data += kChunkBytes) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; ++i) w[i] = load_big_endian(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t low = turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t high = turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    std::memcpy(s, state, sizeof(s));
    for (int i = 0; i < 64; ++i) {
      const uint32_t high = turn(s[4], 6) ^ turn(s[4], 11) ^ turn(s[4], 25);
      const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
      const uint32_t first = s[7] + high + choice + kRounds[i] + w[i];
      const uint32_t low = turn(s[0], 2) ^ turn(s[0], 13) ^ turn(s[0], 22);
      const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
      std::memmove(s + 1, s, 7 * sizeof(uint32_t));
      s[4] += first;
      s[0] = first + low + majority;
    }
    for (int i = 0; i < 8; ++i) state[i] += s[i];
  }
}

#if defined(__x86_64__)

// The same by the processor's own instructions, which keep the state as ABEF and CDGH.
__attribute__((target("sha,sse4.1,ssse3"))) void digest_chunks_fast(uint32_t* state,
                                                                     const uint8_t* data,
                                                                     int64_t num_chunks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i* halves = reinterpret_cast<const __m128i*>(state);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(halves), 0xB1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(halves + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
  for (; num_chunks > 0; --num_chunks, data += kChunkBytes) {
    const __m128i before_abef = abef, before_cdgh = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) {
      const __m128i* words = reinterpret_cast<const __m128i*>(data) + i;
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(words), swap);
    }
    for (int i = 0; i < 16; ++i) {
      const __m128i now = w[i & 3];
      const __m128i* rounds = reinterpret_cast<const __m128i*>(kRounds) + i;
      const __m128i sum = _mm_add_epi32(now, _mm_loadu_si128(rounds));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
      // Four words of sixteen rounds later, where there are any.
      const __m128i last = w[(i + 3) & 3], seventh = _mm_alignr_epi8(last, w[(i + 2) & 3], 4);
      const __m128i partly = _mm_add_epi32(_mm_sha256msg1_epu32(now, w[(i + 1) & 3]), seventh);
      w[i & 3] = _mm_sha256msg2_epu32(partly, last);
    }
    abef = _mm_add_epi32(abef, before_abef);
    cdgh = _mm_add_epi32(cdgh, before_cdgh);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  __m128i* out = reinterpret_cast<__m128i*>(state);
  _mm_storeu_si128(out, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(out + 1, _mm_alignr_epi8(dchg, feba, 8));
}

bool has_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  const bool has_sse = (c >> 9 & 1) != 0 && (c >> 19 & 1) != 0;  // SSSE3, SSE4.1
  return has_sse && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0;
}

#endif

using Digest = void (*)(uint32_t*, const uint8_t*, int64_t);

Digest choose_digest() {
#if defined(__x86_64__)
  if (has_instructions()) return digest_chunks_fast;
#endif
  return digest_chunks;
}

// Pickle's operations, protocol 5.
enum : uint8_t {
  kProtocol = 0x80, kFrame = 0x95, kShortBytes = 'C', kMemoize = 0x94, kMark = '(', kTuple = 't',
  kByte = 'K', kTwoBytes = 'M', kFourBytes = 'J', kNone = 'N', kTupleOfThree = 0x87, kStop = '.'
};

constexpr int kHeaderBytes = 11;

// A block's pickle, padded for SHA-256 as it is hashed.
class Message {
 public:
  explicit Message(int32_t block_size) : bytes_(5 * int64_t{block_size} + 4 * kChunkBytes) {
    const uint8_t head[] = {kProtocol, 5, kFrame, 0, 0, 0, 0, 0, 0, 0, 0, kShortBytes, kHashBytes};
    std::memcpy(bytes_.data(), head, sizeof(head));
    parent_ = bytes_.data() + sizeof(head);
    parent_[kHashBytes] = kMemoize;
    parent_[kHashBytes + 1] = kMark;
  }

  void write(const uint8_t* parent, const int32_t* token_ids, int32_t count) {
    std::memcpy(parent_, parent, kHashBytes);
    uint8_t* at = parent_ + kHashBytes + 2;
    for (int32_t i = 0; i < count; ++i) at = write_int(at, static_cast<uint32_t>(token_ids[i]));
    const uint8_t tail[] = {kTuple, kMemoize, kNone, kTupleOfThree, kMemoize, kStop};
    std::memcpy(at, tail, sizeof(tail));
    size_ = at + sizeof(tail) - bytes_.data();
    const uint64_t frame = static_cast<uint64_t>(size_ - kHeaderBytes);
    for (int i = 0; i < 8; ++i) bytes_[kHeaderBytes - 8 + i] = static_cast<uint8_t>(frame >> 8 * i);
  }

  void hash(Digest digest, uint8_t* out) {
    const uint64_t bits = static_cast<uint64_t>(size_) * 8;
    const int64_t padded = (size_ + 9 + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
    std::memset(bytes_.data() + size_, 0, padded - size_);
    bytes_[size_] = 0x80;
    for (int i = 0; i < 8; ++i) bytes_[padded - 1 - i] = static_cast<uint8_t>(bits >> 8 * i);
    uint32_t state[8];
    std::memcpy(state, kStart, sizeof(state));
    digest(state, bytes_.data(), padded / kChunkBytes);
    for (int i = 0; i < kHashBytes; ++i) out[i] = static_cast<uint8_t>(state[i / 4] >> (24 - i % 4 * 8));
  }

 private:
  // One, two or four bytes behind their operation; all five are written, without a branch that
  // random token ids would mislead.
  static uint8_t* write_int(uint8_t* at, uint32_t value) {
    static constexpr uint8_t kOperations[3] = {kByte, kTwoBytes, kFourBytes};
    const int size = (value > 0xff) + (value > 0xffff);
    at[0] = kOperations[size];
    for (int i = 0; i < 4; ++i) at[1 + i] = static_cast<uint8_t>(value >> 8 * i);
    return at + 1 + (1 << size);
  }

  std::vector<uint8_t> bytes_;
  uint8_t* parent_;
  int64_t size_ = 0;
};

}  // namespace

extern "C" int32_t vn_hash_blocks(const uint8_t* parent, const int32_t* token_ids,
                                  int64_t num_blocks, int32_t block_size, uint8_t* hashes) {
  // Shorter tuples are pickled otherwise, longer ones in several frames.
  if (block_size < 4 || block_size > 8192) return VN_INVALID;
  try {
    static const Digest digest = choose_digest();
    Message message(block_size);
    for (int64_t i = 0; i < num_blocks; ++i) {
      message.write(i == 0 ? parent : hashes + (i - 1) * kHashBytes, token_ids + i * block_size,
                    block_size);
      message.hash(digest, hashes + i * kHashBytes);
    }
    return VN_OK;
  } catch (const std::bad_alloc&) {
    return VN_NO_MEMORY;
  }
}
