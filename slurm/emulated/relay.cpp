// The relay of an emulated network: it takes what each node sends, lets it wait as long as a link with distance
// would, and hands it to the node that it is for.
//
//   relay DELAY_S JITTER_S LOSS UP_S_PER_BYTE DOWN_S_PER_BYTE QUEUE_S SEED STATISTICS DESCRIPTOR...
//
// Each DESCRIPTOR is a TUN device, in the order of the nodes' addresses. A packet waits in its sender's queue
// until the uplink has sent what came before it, travels for DELAY_S and up to JITTER_S more, in the order in
// which it was sent, and waits in the receiver's queue until the downlink has brought what came before it. A
// queue that is QUEUE_S long takes no more. STATISTICS is the descriptor of a file, overwritten every second. It
// ends when its standard input does.

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <queue>
#include <random>
#include <vector>

namespace {

constexpr int64_t SECOND = 1'000'000'000;   // times are in nanoseconds
constexpr int64_t LATE = SECOND / 1000;     // what is handed over later than that is counted
constexpr int ROOM = 512;                    // bytes of the statistics
constexpr int LARGEST = 65536, AT_ONCE = 64;  // bytes of a packet; packets of a node before the next one's turn
// Bytes of a packet that waits in no queue, though others wait for it: an acknowledgement. Behind the data of the
// other direction it would make both slow; Linux's fair queues (fq_codel, RFC 8290) let sparse packets go first.
constexpr int64_t SMALL = 128;

int64_t clock_of(clockid_t which) {
  timespec now;
  clock_gettime(which, &now);
  return now.tv_sec * SECOND + now.tv_nsec;
}

int64_t now() { return clock_of(CLOCK_MONOTONIC); }

struct Link {
  double delay, jitter, loss, up, down, queue;  // times in nanoseconds, up and down for a byte
};

struct Packet {
  int64_t due, number;  // number: what is due at the same time keeps its order
  std::vector<char>* bytes;
  int from, to;
  bool arrives;  // at the end of its downlink; else at its beginning
  bool operator<(const Packet& other) const {
    return due != other.due ? due > other.due : number > other.number;  // the earliest is the top of the heap
  }
};

struct Statistics {
  int64_t packets = 0, bytes = 0, dropped = 0, lost = 0, late = 0, latest = 0;

  // Into an open file, whose content is always of one length, so that it is never half there.
  void write(int file, int64_t seconds) const {
    char line[ROOM];
    memset(line, ' ', ROOM);
    const int length = snprintf(
        line, ROOM,
        "{\"seconds\": %.3f, \"cpu_s\": %.3f, \"packets\": %lld, \"bytes\": %lld, \"dropped\": %lld, "
        "\"lost\": %lld, \"late\": %lld, \"latest_s\": %.6f}",
        double(seconds) / SECOND, double(clock_of(CLOCK_PROCESS_CPUTIME_ID)) / SECOND, (long long)packets,
        (long long)bytes, (long long)dropped, (long long)lost, (long long)late, double(latest) / SECOND);
    line[std::min(length, ROOM - 1)] = ' ';
    if (pwrite(file, line, ROOM, 0) < 0) perror("relay: statistics");
  }
};

// The node that a packet is for, by the last two bytes of its IPv4 address; -1 where it is for none.
int destination(const char* bytes, ssize_t size, int nodes) {
  if (size < 20 || (bytes[0] & 0xF0) != 0x40) return -1;
  const auto* address = reinterpret_cast<const unsigned char*>(bytes + 16);
  const int node = address[2] * 256 + address[3] - 1;
  return address[0] == 10 && node >= 0 && node < nodes ? node : -1;
}

class Relay {
 public:
  Relay(Link link, uint64_t seed, std::vector<int> devices)
      : link(link), devices(std::move(devices)), chance(seed) {
    const size_t nodes = this->devices.size();
    up_free.assign(nodes, 0);
    down_free.assign(nodes, 0);
    last.assign(nodes * nodes, 0);
    last_small = last;
  }

  // Take what a node has sent, up to AT_ONCE packets.
  void take(int from) {
    static char buffer[LARGEST];
    for (int count = 0; count < AT_ONCE; ++count) {
      const ssize_t size = read(devices[from], buffer, LARGEST);
      if (size <= 0) return;
      const int to = destination(buffer, size, int(devices.size()));
      if (to < 0) continue;  // a node asks who else is there
      const int64_t came = now(), sent = pass(up_free[from], came, size, link.up);
      if (sent < 0) continue;
      if (link.loss > 0 && share(chance) < link.loss) {
        ++told.lost;
        continue;
      }
      // As in a queue on the way, what is late makes late what follows.
      int64_t& before = (size > SMALL ? last : last_small)[from * devices.size() + to];
      const double way = link.delay + link.jitter * share(chance);
      before = std::max(before, sent + int64_t(way));
      waiting.push({before, ++number, new std::vector<char>(buffer, buffer + size), from, to, false});
    }
  }

  // Move on what is due.
  void deliver() {
    while (!waiting.empty() && waiting.top().due <= now()) {
      Packet packet = waiting.top();
      waiting.pop();
      const int64_t size = int64_t(packet.bytes->size());
      if (!packet.arrives) {
        packet.due = pass(down_free[packet.to], packet.due, size, link.down);
        if (packet.due < 0) {
          delete packet.bytes;
          continue;
        }
        packet.arrives = true;
        waiting.push(packet);
        continue;
      }
      const int64_t late = now() - packet.due;
      told.late += late > LATE;
      told.latest = std::max(told.latest, late);
      if (write(devices[packet.to], packet.bytes->data(), size) == size) {
        ++told.packets;
        told.bytes += size;
      } else {
        ++told.dropped;
      }
      delete packet.bytes;
    }
  }

  // Nanoseconds until something is due; at most one second.
  int64_t pause() const {
    return waiting.empty() ? SECOND : std::clamp<int64_t>(waiting.top().due - now(), 0, SECOND);
  }

  Statistics told;

 private:
  // When a packet that comes at a time has passed a queue of which we know when it is empty; -1: it is full.
  int64_t pass(int64_t& empty, int64_t came, int64_t size, double per_byte) {
    const int64_t begins = std::max(came, empty), takes = int64_t(size * per_byte);
    if (size > SMALL && begins - came > link.queue) {
      ++told.dropped;
      return -1;
    }
    empty = begins + takes;
    return size > SMALL ? empty : came + takes;
  }

  Link link;
  std::vector<int> devices;
  // Of each node, and of each pair (apart from small packets, and of these): when it is free again.
  std::vector<int64_t> up_free, down_free, last, last_small;
  std::priority_queue<Packet> waiting;
  std::mt19937_64 chance;
  std::uniform_real_distribution<double> share{0.0, 1.0};
  int64_t number = 0;
};

}  // namespace

int main(int count, char** words) {
  if (count < 10) {
    fprintf(stderr, "relay: too few words; see relay.cpp\n");
    return 2;
  }
  const auto number = [&](int at) { return strtod(words[at], nullptr); };
  const Link link{number(1) * SECOND, number(2) * SECOND, number(3),
                  number(4) * SECOND, number(5) * SECOND, number(6) * SECOND};
  const int statistics = atoi(words[8]);
  std::vector<int> devices;
  std::vector<pollfd> ready{{0, POLLIN, 0}};
  for (int at = 9; at < count; ++at) {
    devices.push_back(atoi(words[at]));
    fcntl(devices.back(), F_SETFL, fcntl(devices.back(), F_GETFL) | O_NONBLOCK);
    ready.push_back({devices.back(), POLLIN, 0});
  }
  prctl(PR_SET_TIMERSLACK, 1);  // by default the kernel may wake it 50 us late
  Relay relay(link, strtoull(words[7], nullptr, 10), devices);
  const int64_t began = now();
  int64_t written = began;
  while (true) {
    const int64_t pause = relay.pause();
    const timespec until{pause / SECOND, pause % SECOND};
    if (ppoll(ready.data(), ready.size(), &until, nullptr) < 0 && errno != EINTR) {
      perror("relay: ppoll");
      return 1;
    }
    if (ready[0].revents) {
      char nothing;
      if (read(0, &nothing, 1) <= 0) break;
    }
    for (size_t at = 1; at < ready.size(); ++at) {
      if (ready[at].revents & POLLIN) relay.take(int(at) - 1);
    }
    relay.deliver();
    if (now() - written > SECOND) {
      written = now();
      relay.told.write(statistics, written - began);
    }
  }
  relay.told.write(statistics, now() - began);
  return 0;
}
