/* How many threads compute together: fewer while other processes use their cores.

   A region of OpenMP ends with its slowest thread. If another process runs on the core of one thread, all others wait for
   whole time slices of the kernel, which are milliseconds, while a region takes microseconds. Two threads beside one busy
   process then have a quarter of the speed that they have alone, where one thread would have half of it and more. So the
   time is measured in which the first thread that has ended its work waits for the last one. If that is too much of a
   window, the team gets smaller by one thread, and the kernel runs the others on cores of their own. After a pause, one
   more thread is tried for a window. While that does not pay, pauses get longer.

   omp_set_num_threads also sets the threads of torch's operations that are called from this thread. Only regions show
   whether threads are late. So a step without regions, such as a prompt's, computes with all threads: otherwise a team
   that is small would stay so as long as there are only such steps. The results of our own kernels do not depend on the
   number of threads. */

#include "kernels.h"
#include "team.h"

#include <omp.h>
#include <time.h>

enum { MAX_THREADS = 256 }; /* larger teams stay as they are */
static const int64_t WINDOW_NS = 20000000; /* time in regions; it must hold several time slices */
static const int64_t MIN_PAUSE_NS = 50000000, MAX_PAUSE_NS = 1600000000;
/* Of two threads, one alone takes twice as long at most; less where memory is the limit. */
static const double MAX_LOST_SHARE = 0.4;

typedef struct {
    int size, full;                 /* threads now, and at most; 0: nothing has been computed yet */
    int64_t elapsed_ns, waited_ns;  /* in the regions of this window */
    int64_t retry_ns, pause_ns;     /* when to try one more thread, and the next pause */
    int is_lifted;                  /* whether all threads compute until the next region */
    int is_trying;                  /* whether the newest thread has not been there for a whole window */
    int paused_threads;             /* OpenMP's number of threads before pause_team; 0: it is not paused */
} team_state;

static _Thread_local team_state team; /* of the thread that begins regions */

/* When each thread ended its work; a cache line for each. */
static struct { _Alignas(64) int64_t ns; } work_ends[MAX_THREADS];

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void resize(int size) {
    team.size = size;
    team.elapsed_ns = team.waited_ns = 0;
    omp_set_num_threads(size);
}

int64_t begin_region(void) {
    if (team.paused_threads) return 0;
    const int64_t now = now_ns();
    if (team.is_lifted && omp_get_max_threads() == team.full) omp_set_num_threads(team.size);
    team.is_lifted = 0;
    const int size = omp_get_max_threads();
    if (size != team.size) team = (team_state){.size = size, .full = size, .pause_ns = MIN_PAUSE_NS}; /* by others */
    if (team.size < team.full && now >= team.retry_ns) {
        resize(team.size + 1);
        team.is_trying = 1;
        team.retry_ns = INT64_MAX; /* the window decides */
    }
    return now;
}

void use_all_threads(void) {
    if (team.size == team.full || omp_get_max_threads() != team.size) return;
    omp_set_num_threads(team.full);
    team.is_lifted = 1;
}

void pause_team(void) {
    team.paused_threads = omp_get_max_threads();
    omp_set_num_threads(1);
}

void resume_team(void) {
    omp_set_num_threads(team.paused_threads);
    team.paused_threads = 0;
}

void end_work(void) {
    const int thread = omp_get_thread_num();
    if (thread < MAX_THREADS) work_ends[thread].ns = now_ns();
}

void end_region(int64_t began_ns) {
    if (team.paused_threads || team.size < 2 || team.size > MAX_THREADS) return;
    const int64_t now = now_ns();
    int64_t first_end = now;
    for (int thread = 0; thread < team.size; thread++)
        if (work_ends[thread].ns < first_end) first_end = work_ends[thread].ns;
    if (first_end < began_ns) return; /* OpenMP had fewer threads than it was asked for */
    team.elapsed_ns += now - began_ns;
    team.waited_ns += now - first_end;
    if (team.elapsed_ns < WINDOW_NS) return;
    if ((double)team.waited_ns > MAX_LOST_SHARE * (double)team.elapsed_ns) {
        team.retry_ns = now + team.pause_ns;
        team.pause_ns = 2 * team.pause_ns < MAX_PAUSE_NS ? 2 * team.pause_ns : MAX_PAUSE_NS;
        resize(team.size - 1);
    } else if (team.is_trying) {
        team.pause_ns = team.pause_ns / 4 > MIN_PAUSE_NS ? team.pause_ns / 4 : MIN_PAUSE_NS;
        team.retry_ns = now + team.pause_ns;
    }
    team.is_trying = 0;
    team.elapsed_ns = team.waited_ns = 0;
}
