/* Sums over the processes of one machine, in memory that they share.

XLA calls `tnt_jax_sum` on each device. The ranks of a sum write their values to mailboxes, post
them, and add up what the others have posted, always in the order of the ranks. A call that has to
wait for longer than a few microseconds becomes a future, which a thread of this file fulfils: sums
never hold a thread of XLA's pool, so their order does not matter. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/c_api.h"

enum {
  LINE = 64,               /* Bytes of a cache line. */
  PAGE = 4096,
  PIECE = 1 << 18,         /* Bytes of a mailbox; longer sums are made in pieces. */
  SMALL = 1 << 13,         /* Bytes up to which every rank adds up all values by itself. */
  MOST_RANKS = 64,
  MOST_SLOTS = 1 << 16,
  CHECK_MS = 100,          /* Between two looks at whether the others still live. */
};

static const char NO_MEMORY[] = "no memory is left for sums between processes";
static const char LEFT[] = "this process has left its job";
static const char UNLIKE[] = "another process sums values of another size or type: every process "
                             "must run the same programs in the same order";

typedef _Atomic uint32_t word;

typedef struct {           /* What one rank has posted in a slot. */
  _Alignas(LINE) word posted;
  uint32_t pieces;         /* Pieces that were finished, of this rank alone. */
  uint64_t kinds[2];       /* Of the whole sum, by the parity of its pieces. */
  word busy;
} Mark;

typedef struct {           /* How a process is woken. */
  _Alignas(LINE) word rings;
  word sleeps;
} Bell;

typedef struct {           /* First page of the memory. */
  char token[LINE];
  word lost;               /* 1 + the process that has ended, or 0. */
  word unlike;             /* Whether processes have summed what does not belong together. */
} Head;

typedef struct {           /* What is summed, and where the result goes. */
  const char* value;
  char* result;
  size_t nbytes;
} Array;

typedef struct Sum {
  struct Sum* next;
  const XLA_FFI_Api* api;
  XLA_FFI_Future* future;
  char* slot;
  int rank, num_arrays, dtype, phase;
  int shares;              /* Whether all take the values of rank 0, and nothing is added. */
  size_t itemsize, nbytes, done;
  uint64_t kind;           /* A digest of the type and the shapes of the arrays. */
  uint32_t wanted;         /* What the others must have posted. */
  const char* failure;
  Array arrays[];          /* Copied: XLA may write those of another device over its own list. */
} Sum;

static struct {
  int fd, process, num_processes, num_ranks, spin_us;
  int32_t device_of[MOST_RANKS];
  int32_t number_of[MOST_RANKS];  /* Of a process of this host, among all of the job. */
  Head* head;
  Bell* bells;
  char* _Atomic slots[MOST_SLOTS];
  pthread_mutex_t lock;
  pthread_t thread;
  Sum* coming;
  _Atomic int num_waiting;         /* Sums that wait for the values of others. */
  _Atomic int is_open, stop;
} here = {.lock = PTHREAD_MUTEX_INITIALIZER};

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static size_t marks_bytes(void) {
  size_t bytes = (size_t)here.num_ranks * sizeof(Mark);
  return (bytes + PAGE - 1) / PAGE * PAGE;
}

static size_t slot_bytes(void) { return marks_bytes() + 2 * (size_t)here.num_ranks * PIECE; }

static size_t first_slot(void) {
  return PAGE + (MOST_RANKS * sizeof(Bell) + PAGE - 1) / PAGE * PAGE;
}

static Mark* mark_of(const Sum* sum, int rank) { return (Mark*)sum->slot + rank; }

static char* mailbox(const Sum* sum, int rank) {
  uint32_t parity = mark_of(sum, sum->rank)->pieces & 1;
  return sum->slot + marks_bytes() + ((size_t)parity * here.num_ranks + rank) * PIECE;
}

static char* map_slot(int64_t index) {
  char* slot = atomic_load(&here.slots[index]);
  if (slot != NULL) return slot;
  pthread_mutex_lock(&here.lock);
  slot = here.slots[index];
  if (slot == NULL) {
    off_t at = (off_t)(first_slot() + (size_t)index * slot_bytes());
    slot = mmap(NULL, slot_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, here.fd, at);
    if (slot == MAP_FAILED) slot = NULL;
    atomic_store(&here.slots[index], slot);
  }
  pthread_mutex_unlock(&here.lock);
  return slot;
}

static void ring(int process) {
  Bell* bell = &here.bells[process];
  atomic_fetch_add(&bell->rings, 1);
  syscall(SYS_futex, &bell->rings, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void post(Sum* sum) {
  Mark* mark = mark_of(sum, sum->rank);
  sum->wanted = atomic_load_explicit(&mark->posted, memory_order_relaxed) + 1;
  atomic_store(&mark->posted, sum->wanted);  /* Before the flags are read. */
  for (int process = 0; process < here.num_processes; process++)
    if (atomic_load(&here.bells[process].sleeps)) ring(process);
}

static int all_posted(Sum* sum) {
  for (int rank = 0; rank < here.num_ranks; rank++) {
    Mark* mark = mark_of(sum, rank);
    uint32_t posted = atomic_load_explicit(&mark->posted, memory_order_acquire);
    if ((int32_t)(posted - sum->wanted) < 0) return 0;
  }
  return 1;
}

#define ADD(type)                                                                       \
  static void add_##type(type* restrict to, const type* a, const type* b, size_t n) {   \
    for (size_t i = 0; i < n; i++) to[i] = a[i] + b[i];                                  \
  }                                                                                      \
  static void append_##type(type* restrict to, const type* restrict a, size_t n) {      \
    for (size_t i = 0; i < n; i++) to[i] += a[i];                                        \
  }
ADD(float)
ADD(double)
ADD(uint32_t)
ADD(uint64_t)

/* to = the sum of the values at `offset` of all mailboxes, in the order of the ranks. */
static void add_mailboxes(const Sum* sum, char* to, size_t offset, size_t nbytes) {
#define SUM(type)                                                                        \
  {                                                                                      \
    add_##type((type*)to, (type*)(mailbox(sum, 0) + offset),                             \
               (type*)(mailbox(sum, 1) + offset), nbytes / sizeof(type));                \
    for (int rank = 2; rank < here.num_ranks; rank++)                                    \
      append_##type((type*)to, (type*)(mailbox(sum, rank) + offset),                     \
                    nbytes / sizeof(type));                                              \
    break;                                                                               \
  }
  switch (sum->dtype) {
    case XLA_FFI_DataType_F32: SUM(float)
    case XLA_FFI_DataType_F64: SUM(double)
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32: SUM(uint32_t)
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64: SUM(uint64_t)
  }
}

enum { TO_MAILBOX, FROM_SEGMENTS, FROM_FIRST, ADD_UP };

static size_t segment_bytes(size_t piece) {
  size_t lines = (piece + LINE - 1) / LINE;
  return (lines + here.num_ranks - 1) / here.num_ranks * LINE;
}

/* Moves the bytes of the current piece between the arrays, which follow one another, and the
mailboxes. */
static void move_piece(const Sum* sum, size_t piece, int how) {
  size_t begin = 0;  /* Of the array among all. */
  for (int index = 0; index < sum->num_arrays; index++) {
    const Array* array = sum->arrays + index;
    size_t nbytes = array->nbytes;
    size_t low = begin > sum->done ? begin : sum->done;
    size_t high = begin + nbytes < sum->done + piece ? begin + nbytes : sum->done + piece;
    if (low < high) {
      char* result = array->result + (low - begin);
      size_t offset = low - sum->done, length = high - low;
      if (how == TO_MAILBOX)
        memcpy(mailbox(sum, sum->rank) + offset, array->value + (low - begin), length);
      else if (how == ADD_UP)
        add_mailboxes(sum, result, offset, length);
      else if (how == FROM_FIRST)
        memcpy(result, mailbox(sum, 0) + offset, length);
      else
        for (size_t segment = segment_bytes(piece); length > 0;) {
          int owner = (int)(offset / segment);
          size_t part = segment * (owner + 1) - offset;
          if (part > length) part = length;
          memcpy(result, mailbox(sum, owner) + offset, part);
          result += part, offset += part, length -= part;
        }
    }
    begin += nbytes;
  }
}

enum { START, VALUES, SEGMENTS };

/* Goes on with a sum, and returns whether it is complete or has failed. */
static int advance(Sum* sum) {
  for (;;) {
    size_t piece = sum->nbytes - sum->done < PIECE ? sum->nbytes - sum->done : PIECE;
    Mark* own = mark_of(sum, sum->rank);
    if (sum->phase == START) {
      if (!sum->shares || sum->rank == 0) move_piece(sum, piece, TO_MAILBOX);
      own->kinds[own->pieces & 1] = sum->kind;
      post(sum);
      sum->phase = VALUES;
    }
    if (!all_posted(sum)) return 0;
    if (sum->phase == VALUES) {
      for (int rank = 0; rank < here.num_ranks; rank++)
        if (mark_of(sum, rank)->kinds[own->pieces & 1] != sum->kind) {
          atomic_store(&here.head->unlike, 1);
          sum->failure = UNLIKE;
          return 1;
        }
      int is_added = !sum->shares && here.num_ranks > 1;
      if (is_added && here.num_ranks > 2 && piece > SMALL) {
        size_t segment = segment_bytes(piece), begin = segment * sum->rank;
        if (begin < piece) {
          size_t length = piece - begin < segment ? piece - begin : segment;
          char* values = malloc(length);
          if (values == NULL) {
            sum->failure = NO_MEMORY;
            return 1;
          }
          add_mailboxes(sum, values, begin, length);
          memcpy(mailbox(sum, sum->rank) + begin, values, length);
          free(values);
        }
        post(sum);
        sum->phase = SEGMENTS;
        continue;
      }
      move_piece(sum, piece, is_added ? ADD_UP : FROM_FIRST);
    } else {
      move_piece(sum, piece, FROM_SEGMENTS);
    }
    own->pieces++;
    sum->done += piece;
    if (sum->done == sum->nbytes) {
      atomic_store(&own->busy, 0);
      return 1;
    }
    sum->phase = START;
  }
}

static XLA_FFI_Error* error_of(const XLA_FFI_Api* api, const char* message) {
  XLA_FFI_Error_Create_Args args = {.struct_size = sizeof args,
                                    .message = message,
                                    .errc = XLA_FFI_Error_Code_UNAVAILABLE};
  return api->XLA_FFI_Error_Create(&args);
}

/* Returns why no sum can be completed any more, or NULL. */
static const char* why_broken(char text[PAGE]) {
  uint32_t lost = atomic_load(&here.head->lost);
  if (here.stop) return LEFT;
  if (atomic_load(&here.head->unlike)) return UNLIKE;
  if (lost == 0) return NULL;
  snprintf(text, PAGE, "process %d has ended or left the job", here.number_of[lost - 1]);
  return text;
}

static void finish(Sum* sum, const char* failure) {
  const XLA_FFI_Api* api = sum->api;
  XLA_FFI_Error* failed = NULL;
  here.num_waiting--;
  if (failure == NULL) {
    XLA_FFI_Future_SetAvailable_Args args = {.struct_size = sizeof args, .future = sum->future};
    failed = api->XLA_FFI_Future_SetAvailable(&args);  /* Runs what has waited for the sum. */
  } else {
    XLA_FFI_Future_SetError_Args args = {
        .struct_size = sizeof args, .future = sum->future, .error = error_of(api, failure)};
    failed = api->XLA_FFI_Future_SetError(&args);
  }
  if (failed != NULL) {
    XLA_FFI_Error_Destroy_Args args = {.struct_size = sizeof args, .error = failed};
    api->XLA_FFI_Error_Destroy(&args);
  }
  free(sum);
}

/* The kernel gives up the lock of a process that ends, however it ends. */
static void look_for_lost(void) {
  for (int process = 0; process < here.num_processes; process++) {
    if (process == here.process) continue;
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = process, .l_len = 1};
    if (fcntl(here.fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK)
      atomic_store(&here.head->lost, (uint32_t)process + 1);
  }
}

static void* fulfil(void* unused) {
  Sum* open = NULL;
  Bell* bell = &here.bells[here.process];
  int is_ready = 0;
  (void)unused;
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  /* As XLA's threads: denormals count as zero. */
#elif defined(__aarch64__)
  uint64_t control;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  __asm__ volatile("msr fpcr, %0" : : "r"(control | (1u << 24)));
#endif
  for (;;) {
    uint32_t rings = atomic_load(&bell->rings);
    int is_ending = here.stop;
    atomic_store(&bell->sleeps, !is_ready);
    atomic_thread_fence(memory_order_seq_cst);  /* Before what the others have posted is read. */
    pthread_mutex_lock(&here.lock);
    while (here.coming != NULL) {
      Sum* sum = here.coming;
      here.coming = sum->next;
      sum->next = open;
      open = sum;
    }
    pthread_mutex_unlock(&here.lock);
    char text[PAGE];
    const char* broken = why_broken(text);
    int was_ready = 0;
    for (Sum** at = &open; *at != NULL;) {
      Sum* sum = *at;
      int is_over = advance(sum);
      if (!is_over && broken == NULL) {
        at = &sum->next;
        continue;
      }
      *at = sum->next;
      was_ready = 1;
      finish(sum, is_over ? sum->failure : broken);
    }
    if (is_ending && open == NULL) return NULL;
    is_ready = was_ready;
    if (was_ready) continue;
    struct timespec limit = {.tv_nsec = CHECK_MS * 1000000};
    if (atomic_load(&bell->sleeps)) {
      long slept = syscall(SYS_futex, &bell->rings, FUTEX_WAIT, rings, open != NULL ? &limit : NULL,
                           NULL, 0);
      if (slept != 0 && errno == ETIMEDOUT) look_for_lost();
    }
  }
}

static void relax(void) {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Returns an attribute, -1 if there is none of that name. */
static int64_t number_of(const XLA_FFI_CallFrame* frame, const char* name) {
  for (int64_t index = 0; index < frame->attrs.size; index++) {
    const XLA_FFI_ByteSpan* span = frame->attrs.names[index];
    if (span->len == strlen(name) && memcmp(span->ptr, name, span->len) == 0)
      return *(int64_t*)((XLA_FFI_Scalar*)frame->attrs.attrs[index])->value;
  }
  return -1;
}

/* FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv, with words in place of bytes. */
static uint64_t mixed(uint64_t digest, uint64_t number) {
  return (digest ^ number) * 1099511628211u;
}

/* Returns the sum that a call asks for, without its rank and slot, or NULL. */
static Sum* sum_of(const XLA_FFI_CallFrame* frame) {
  int num_arrays = (int)frame->args.size;
  Sum* sum = calloc(1, sizeof *sum + (size_t)num_arrays * sizeof *sum->arrays);
  if (sum == NULL) return NULL;
  sum->api = frame->api;
  sum->rank = -1;
  sum->num_arrays = num_arrays;
  sum->shares = number_of(frame, "shares") == 1;
  sum->dtype = ((XLA_FFI_Buffer*)frame->args.args[0])->dtype;
  sum->itemsize = sum->dtype == XLA_FFI_DataType_F64 || sum->dtype == XLA_FFI_DataType_S64 ||
                  sum->dtype == XLA_FFI_DataType_U64 ? 8 : 4;
  sum->kind = mixed(mixed(14695981039346656037u, (uint64_t)sum->dtype), (uint64_t)sum->shares);
  for (int index = 0; index < num_arrays; index++) {
    const XLA_FFI_Buffer* buffer = frame->args.args[index];
    Array* array = sum->arrays + index;
    array->value = buffer->data;
    array->result = ((XLA_FFI_Buffer*)frame->rets.rets[index])->data;
    array->nbytes = sum->itemsize;
    sum->kind = mixed(sum->kind, (uint64_t)buffer->rank);
    for (int64_t d = 0; d < buffer->rank; d++) {
      array->nbytes *= (size_t)buffer->dims[d];
      sum->kind = mixed(sum->kind, (uint64_t)buffer->dims[d]);
    }
    sum->nbytes += array->nbytes;
  }
  return sum;
}

/* Looks for the values of others for a few microseconds; returns whether the sum is over. */
static int advance_for_a_while(Sum* sum) {
  uint64_t begin = now_ns();
  for (int look = 0;; look++) {
    if (advance(sum)) return 1;
    if (look < 64) {
      relax();
    } else {
      if (now_ns() - begin > 1000u * (uint64_t)here.spin_us) return 0;
      sched_yield();
    }
  }
}

/* Leaves a sum to the thread, and tells XLA that its results come later. */
static XLA_FFI_Error* later(Sum* sum, XLA_FFI_CallFrame* frame) {
  XLA_FFI_Future_Create_Args future = {.struct_size = sizeof future};
  pthread_mutex_lock(&here.lock);
  XLA_FFI_Error* failed =
      here.stop ? error_of(sum->api, LEFT) : sum->api->XLA_FFI_Future_Create(&future);
  if (failed == NULL) {
    here.num_waiting++;
    sum->future = frame->future = future.future;
    sum->next = here.coming;
    here.coming = sum;
  }
  pthread_mutex_unlock(&here.lock);
  if (failed != NULL)
    free(sum);
  else
    ring(here.process);
  return failed;
}

XLA_FFI_Error* tnt_jax_sum(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Api* api = frame->api;
  if (frame->extension_start != NULL &&
      frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    return NULL;
  }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  if (!here.is_open) return error_of(api, "this process is not part of a job whose sums it makes");
  /* Marks of the program that failed may stand in any slot. */
  if (atomic_load(&here.head->unlike)) return error_of(api, UNLIKE);

  XLA_FFI_DeviceOrdinal_Get_Args device = {.struct_size = sizeof device, .ctx = frame->ctx};
  XLA_FFI_Error* failed = api->XLA_FFI_DeviceOrdinal_Get(&device);
  if (failed != NULL) return failed;
  Sum* sum = sum_of(frame);
  if (sum == NULL) return error_of(api, NO_MEMORY);
  int64_t index = number_of(frame, "slot");
  for (int rank = 0; rank < here.num_ranks; rank++)
    if (here.device_of[rank] == device.device_ordinal) sum->rank = rank;
  const char* failure = NULL;
  if (sum->rank < 0 || index < 0 || index >= MOST_SLOTS)
    failure = "a sum has a device or a number that this job does not know";
  else if ((sum->slot = map_slot(index)) == NULL)
    failure = NO_MEMORY;
  else if (atomic_exchange(&mark_of(sum, sum->rank)->busy, 1))
    failure = "a program makes the same sum twice at a time";
  else if (advance_for_a_while(sum))
    failure = sum->failure;
  else
    return later(sum, frame);
  free(sum);
  return failure != NULL ? error_of(api, failure) : NULL;
}

/* Forgets the memory of a job that this process has left, none of whose programs run any more. */
static void forget_memory(void) {
  if (here.head == NULL) return;
  for (int index = 0; index < MOST_SLOTS; index++) {
    char* slot = atomic_exchange(&here.slots[index], NULL);
    if (slot != NULL) munmap(slot, slot_bytes());
  }
  munmap(here.head, first_slot());
  here.head = NULL;
}

/* Joins the sums of a job in the memory `fd`, which process 0 has made. `devices` are XLA's numbers
of the devices of this host, in the order of their ranks. Returns 0, or the number of an error. */
int tnt_jax_sums_open(int fd, int process, int num_processes, const int32_t* processes,
                      int num_ranks, const int32_t* devices, int spin_us) {
  forget_memory();
  here.fd = fd;
  here.process = process;
  here.num_processes = num_processes;
  here.num_ranks = num_ranks;
  here.spin_us = spin_us;
  memcpy(here.number_of, processes, sizeof *processes * (size_t)num_processes);
  memcpy(here.device_of, devices, sizeof *devices * (size_t)num_ranks);
  size_t size = first_slot() + MOST_SLOTS * slot_bytes();
  if (ftruncate(fd, (off_t)size) != 0) return errno;
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = process, .l_len = 1};
  if (fcntl(fd, F_SETLK, &lock) != 0) return errno;
  void* memory = mmap(NULL, first_slot(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return errno;
  here.head = memory;
  here.bells = (Bell*)((char*)memory + PAGE);
  here.stop = 0;
  int failed = pthread_create(&here.thread, NULL, fulfil, NULL);
  if (failed == 0) here.is_open = 1;
  return failed;
}

/* Returns how many sums of this process wait for the values of others. */
int tnt_jax_sums_waiting(void) { return here.num_waiting; }

/* Leaves the job: sums that others wait for fail, on this process and on theirs. */
void tnt_jax_sums_close(void) {
  if (!here.is_open) return;
  here.is_open = 0;
  here.stop = 1;
  ring(here.process);
  pthread_join(here.thread, NULL);
  close(here.fd);
}
