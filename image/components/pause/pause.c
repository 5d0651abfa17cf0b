/*
 * pause holds a pod's namespaces open. As the pod's first process it also inherits orphans, and has to reap them: a pod with a shared PID
 * namespace would fill up with zombies otherwise.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv) {
	sigset_t wanted;
	int got;

	if (argc > 1 && strcmp(argv[1], "-v") == 0) {
		puts("pause " VERSION);
		return 0;
	}
	/* Blocked signals stay pending until sigwait takes them, so that none is lost between two rounds. */
	sigemptyset(&wanted);
	sigaddset(&wanted, SIGCHLD);
	sigaddset(&wanted, SIGINT);
	sigaddset(&wanted, SIGTERM);
	if (sigprocmask(SIG_BLOCK, &wanted, NULL) != 0) {
		perror("pause: block signals");
		return 1;
	}
	for (;;) {
		if (sigwait(&wanted, &got) != 0)
			continue;
		if (got != SIGCHLD)
			return 0;
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
	}
}
