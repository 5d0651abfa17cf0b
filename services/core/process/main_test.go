package process

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// helperEnv makes this test binary play a part instead of running tests: a
// reaper's behaviour belongs to a whole process, and the tests' own must not
// become one.
const helperEnv = "GARBOARD_PROCESS_HELPER"

var helpers = map[string]func(args []string){
	"exit": func(args []string) {
		code, err := strconv.Atoi(args[0])
		check(err)
		os.Exit(code)
	},
	"orphans":    helperOrphans,
	"forget":     helperForget,
	"storm":      helperStorm,
	"init":       helperInit,
	"behind":     helperBehind,
	"grandchild": helperGrandchild,
	"stubborn":   helperStubborn,
	"adopter":    helperAdopter,
	"midwife":    helperMidwife,
	"late":       helperLate,
	"hider":      helperHider,
	"hidden":     helperHidden,
	"say":        func(args []string) { fmt.Print(args[0]); os.Exit(3) },
}

func TestMain(m *testing.M) {
	if name := os.Getenv(helperEnv); name != "" {
		helpers[name](os.Args[1:])
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func helper(name string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), helperEnv+"="+name)
	return cmd
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	}
}

// becomeReaper makes orphaned descendants children of this process, as they are
// PID 1's (PR_SET_CHILD_SUBREAPER, prctl(2)). It needs no privilege.
func becomeReaper() {
	check(unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
}

// helperGrandchild starts a sleeper in its own group that holds the output open,
// prints its PID, and waits for it unless told to leave.
func helperGrandchild(args []string) {
	cmd := exec.Command("sleep", "300")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	check(cmd.Start())
	fmt.Println(cmd.Process.Pid)
	if args[0] == "leave" {
		os.Exit(0)
	}
	check(cmd.Wait())
}

func helperStubborn([]string) {
	ignoreTerm()
	fmt.Println("ready")
	check(unix.Pause())
}
