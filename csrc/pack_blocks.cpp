// A GGUF matrix from its file's blocks into panels (panels.h): codes alone, scales are the caller's.
//
// Nibbles of a run are half-split: the low ones of its bytes are the first half. Eight codes are moved
// at once, a byte each, and a panel's codes go from the file's bytes to their place in one pass.
#include <algorithm>
#include <cstring>
#include <exception>

#include "thread_pool.h"
#include "vllm_native.h"

namespace {

constexpr int kPanel = 64;
constexpr uint64_t kLowNibbles = 0x0f0f0f0f0f0f0f0f, kPairs = 0x0303030303030303,
                   kOnes = 0x0101010101010101;

inline uint64_t load_eight(const uint8_t* bytes) {
  uint64_t codes;
  std::memcpy(&codes, bytes, sizeof(codes));
  return codes;
}

// Eight codes of four bits as a word.
inline uint32_t squeeze_nibbles(uint64_t codes) {
  codes = (codes | codes >> 4) & 0x00ff00ff00ff00ff;
  codes = (codes | codes >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(codes | codes >> 16);
}

// Eight codes of two bits: those of bytes 2b and 2b + 1 lie in the low nibble of byte b.
inline uint32_t squeeze_pairs(uint64_t codes) {
  codes = (codes | codes >> 6) & 0x000f000f000f000f;
  codes = (codes | codes >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(codes | codes >> 16);
}

// The even ones of eight bytes.
inline uint32_t squeeze_bytes(uint64_t codes) {
  codes &= 0x00ff00ff00ff00ff;
  codes = (codes | codes >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(codes | codes >> 16);
}

// Sixteen codes of six bits, as their low nibbles and high pairs, as three words (panels.py).
inline void write_six_bits(const uint64_t* low, const uint64_t* high, uint32_t* words) {
  words[0] = squeeze_nibbles(low[0]);
  words[1] = squeeze_nibbles(low[1]);
  words[2] = squeeze_pairs(high[0]) | squeeze_pairs(high[1]) << 4;
}

// The eight bits of a byte, a byte each.
inline uint64_t spread_bits(uint8_t bits) {
  const uint64_t own = bits * kOnes & 0x8040201008040201;
  return (own + 0x7f7f7f7f7f7f7f7f) >> 7 & kOnes;
}

// A form: bytes of a block, words of its codes, and turn(), which makes these of those.

struct Q8_0 {
  static constexpr int kBytes = 34, kWords = 8;
  static void turn(const uint8_t* block, uint32_t* words) { std::memcpy(words, block + 2, 32); }
};

// Codes of four bits in runs, behind kAt bytes of scales. kSigns makes two's complement of them.
template <int kAt, int kRuns, int kRunBytes, uint32_t kSigns = 0>
struct Nibbles {
  static constexpr int kBytes = kAt + kRuns * kRunBytes, kHalf = kRunBytes / 8;
  static constexpr int kWords = 2 * kHalf * kRuns;
  static void turn(const uint8_t* block, uint32_t* words) {
    for (int run = 0; run < kRuns; ++run) {
      for (int i = 0; i < kHalf; ++i) {
        const uint64_t codes = load_eight(block + kAt + run * kRunBytes + 8 * i);
        words[run * 2 * kHalf + i] = squeeze_nibbles(codes & kLowNibbles) ^ kSigns;
        words[run * 2 * kHalf + kHalf + i] = squeeze_nibbles(codes >> 4 & kLowNibbles) ^ kSigns;
      }
    }
  }
};

// Five bits: four bytes of fifth ones, then sixteen of nibbles. Codes are kept as values + 32, of
// which the high pair is the fifth bit plus kLift.
template <int kAt, uint64_t kLift>
struct FiveBits {
  static constexpr int kBytes = kAt + 20, kWords = 6;
  static void turn(const uint8_t* block, uint32_t* words) {
    for (int half = 0; half < 2; ++half) {
      uint64_t low[2], high[2];
      for (int i = 0; i < 2; ++i) {
        low[i] = load_eight(block + kAt + 4 + 8 * i) >> 4 * half & kLowNibbles;
        high[i] = spread_bits(block[kAt + 2 * half + i]) + kLift * kOnes;
      }
      write_six_bits(low, high, words + 3 * half);
    }
  }
};

struct Q5_K {
  static constexpr int kBytes = 176, kWords = 48;
  static void turn(const uint8_t* block, uint32_t* words) {
    for (int part = 0; part < 16; ++part) {
      const int run = part / 2, at = part % 2 * 16;
      uint64_t low[2], high[2];
      for (int i = 0; i < 2; ++i) {
        low[i] = load_eight(block + 48 + run / 2 * 32 + at + 8 * i) >> run % 2 * 4 & kLowNibbles;
        high[i] = (load_eight(block + 16 + at + 8 * i) >> run & kOnes) + 2 * kOnes;
      }
      write_six_bits(low, high, words + 3 * part);
    }
  }
};

struct Q6_K {
  static constexpr int kBytes = 210, kWords = 48;
  static void turn(const uint8_t* block, uint32_t* words) {
    for (int part = 0; part < 16; ++part) {
      const int half = part / 8, run = part / 2 % 4, at = part % 2 * 16;
      const uint8_t* nibbles = block + 64 * half + run % 2 * 32 + at;
      const uint8_t* pairs = block + 128 + 32 * half + at;
      uint64_t low[2], high[2];
      for (int i = 0; i < 2; ++i) {
        low[i] = load_eight(nibbles + 8 * i) >> run / 2 * 4 & kLowNibbles;
        high[i] = load_eight(pairs + 8 * i) >> 2 * run & kPairs;
      }
      write_six_bits(low, high, words + 3 * part);
    }
  }
};

inline uint32_t load_four(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// Sixteen codes of two bits, at a bit of bytes of a run, as a word: bits 2p, 2p + 1 of byte b are code
// 4p + b (units.h).
inline uint32_t take_pairs(const uint8_t* bytes, int bit) {
  uint32_t word = 0;
  for (int p = 0; p < 4; ++p) word |= (load_four(bytes + 4 * p) >> bit & 0x03030303u) << 2 * p;
  return word;
}

// Codes of two bits in runs of 32, kAt bytes into a block: 64 bytes are two halves of four runs.
template <int kBlockBytes, int kAt>
struct Pairs {
  static constexpr int kBytes = kBlockBytes, kWords = 16;
  static void turn(const uint8_t* block, uint32_t* words) {
    for (int part = 0; part < 16; ++part) {
      const int run = part / 2 % 4;
      words[part] = take_pairs(block + kAt + part / 8 * 32 + part % 2 * 16, 2 * run);
    }
  }
};

// Third bits lie before: bit r of byte i is value i of run r.
struct Q3_K {
  static constexpr int kBytes = 110, kWords = 24;
  static void turn(const uint8_t* block, uint32_t* words) {
    for (int run = 0; run < 8; ++run) {
      uint32_t* out = words + 3 * run;
      out[2] = 0;
      for (int unit = 0; unit < 2; ++unit) {
        out[unit] = take_pairs(block + 32 + run / 4 * 32 + unit * 16, run % 4 * 2);
        for (int p = 0; p < 4; ++p) {
          const uint32_t bits = load_four(block + unit * 16 + 4 * p) >> run & 0x01010101u;
          out[2] |= bits << (4 * unit + p);
        }
      }
    }
  }
};

// Indexes and words of signs as they lie in the file.
struct IQ2_XXS {
  static constexpr int kBytes = 66, kWords = 16;
  static void turn(const uint8_t* block, uint32_t* words) { std::memcpy(words, block + 2, 64); }
};

struct IQ3_XXS {
  static constexpr int kBytes = 98, kWords = 24;
  static void turn(const uint8_t* block, uint32_t* words) {
    for (int group = 0; group < 8; ++group) {
      const uint64_t indexes = load_eight(block + 2 + 8 * group);
      words[3 * group] = squeeze_bytes(indexes);
      words[3 * group + 1] = squeeze_bytes(indexes >> 8);
      words[3 * group + 2] = load_four(block + 66 + 4 * group);
    }
  }
};

// Outputs panel * 64 .. of a matrix.
template <typename Form>
void pack_panel(const uint8_t* rows, int64_t num_rows, int64_t num_blocks, int64_t panel,
                uint32_t* panels) {
  uint32_t tile[kPanel * Form::kWords] = {};
  const int count = static_cast<int>(std::min<int64_t>(kPanel, num_rows - panel * kPanel));
  const uint8_t* first = rows + panel * kPanel * num_blocks * Form::kBytes;
  uint32_t* out = panels + panel * num_blocks * Form::kWords * kPanel;
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int lane = 0; lane < count; ++lane) {
      Form::turn(first + (lane * num_blocks + block) * Form::kBytes, tile + lane * Form::kWords);
    }
    for (int word = 0; word < Form::kWords; ++word, out += kPanel) {
      for (int lane = 0; lane < kPanel; ++lane) out[lane] = tile[lane * Form::kWords + word];
    }
  }
}

struct Packer {
  const char* name;
  int bytes;
  void (*pack)(const uint8_t* rows, int64_t num_rows, int64_t num_blocks, int64_t panel,
               uint32_t* panels);
};

template <typename Form>
constexpr Packer make_packer(const char* name) {
  return {name, Form::kBytes, pack_panel<Form>};
}

constexpr Packer kPackers[] = {
    make_packer<Q8_0>("Q8_0"),
    make_packer<Nibbles<2, 1, 16, 0x88888888>>("Q4_0"),
    make_packer<Nibbles<4, 1, 16>>("Q4_1"),
    make_packer<FiveBits<2, 1>>("Q5_0"),
    make_packer<FiveBits<4, 2>>("Q5_1"),
    make_packer<Nibbles<16, 4, 32>>("Q4_K"),
    make_packer<Q5_K>("Q5_K"),
    make_packer<Q6_K>("Q6_K"),
    make_packer<Nibbles<2, 1, 16>>("IQ4_NL"),
    make_packer<Nibbles<8, 8, 16>>("IQ4_XS"),
    make_packer<Nibbles<1, 1, 16>>("MXFP4"),
    make_packer<Nibbles<4, 4, 8>>("NVFP4"),
    make_packer<Pairs<84, 16>>("Q2_K"),
    make_packer<Pairs<66, 0>>("TQ2_0"),
    make_packer<Q3_K>("Q3_K"),
    make_packer<IQ2_XXS>("IQ2_XXS"),
    make_packer<IQ3_XXS>("IQ3_XXS"),
};

}  // namespace

extern "C" int32_t vn_pack_blocks(const char* type, const uint8_t* rows, int64_t num_rows,
                                  int64_t row_bytes, int32_t num_threads, uint32_t* panels) {
  for (const Packer& packer : kPackers) {
    if (std::strcmp(packer.name, type) != 0 || row_bytes % packer.bytes != 0) continue;
    try {
      vn::ThreadPool pool(num_threads);
      pool.run((num_rows + kPanel - 1) / kPanel, [&](int64_t panel) {
        packer.pack(rows, num_rows, row_bytes / packer.bytes, panel, panels);
      });
      return VN_OK;
    } catch (const std::exception&) {
      return VN_NO_MEMORY;  // or no threads
    }
  }
  return VN_INVALID;
}
