/* How many threads compute together: fewer while other processes use their cores. See team.c. */

#ifndef SERVEKIT_TEAM_H
#define SERVEKIT_TEAM_H

#include <stdint.h>

/* Call this before a region of OpenMP in which all threads have equal work. It sets the number of threads of that region
   and of all that follow. Returns when the region began, for end_region. */
int64_t begin_region(void);

/* Call this in each thread of the region, after its work. */
void end_work(void);

/* Call this after the region. */
void end_region(int64_t began_ns);

/* To wake a thread takes longer than to multiply by a weight of fewer numbers. */
enum { MIN_WEIGHT_FOR_THREADS = 1 << 19 };

/* From pause_team to resume_team, the calling thread computes alone, and nothing is measured. */
void pause_team(void);
void resume_team(void);

#endif
