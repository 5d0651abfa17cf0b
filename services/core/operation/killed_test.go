package operation

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// operateIn, set in the environment, makes the test program run operations on the
// STATE in that directory until it is killed.
const operateIn = "GARBOARD_TEST_OPERATE_IN"

// kills is how often it is killed.
const kills = 150

func TestMain(m *testing.M) {
	if dir := os.Getenv(operateIn); dir != "" {
		if err := operateForever(dir); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// stories are what the steps of an operation leave in the file of effects, by its
// name: each once at least, in this order.
var stories = map[string][]string{
	"works": {"1", "2", "3", "4"},
	"fails": {"1", "2", "3", "undo 3", "undo 2", "undo 1"},
}

// operateForever boots on a STATE, says which operations it finds there, and runs one
// after the other. It says when one has begun, and how one has ended.
func operateForever(dir string) error {
	effects, err := os.OpenFile(filepath.Join(filepath.Dir(dir), "effects"), os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	leave := func(id, what string) error {
		_, err := fmt.Fprintf(effects, "%s %s\n", id, what) // one write: it is there whole, or not at all
		return err
	}
	r, err := New(Options{
		Store: resource.NewStore(), Log: slog.New(slog.DiscardHandler), Dir: dir,
		Definitions: []Definition{leaving("works", 4, leave), leaving("fails", 3, leave)},
	})
	if err != nil {
		return err
	}
	r.Open()
	if _, err := r.Start(context.Background(), Ask{Name: "works", DryRun: true}); err != nil && !errors.As(err, new(Refusal)) {
		return err // it waits for what goes on
	}
	all, err := r.List()
	if err != nil {
		return err
	}
	for _, o := range all {
		fmt.Println("found", o.ID, told(o))
	}
	for i := 0; ; i++ {
		all, err := r.List()
		if err != nil {
			return err
		}
		for _, o := range all { // the one that goes on comes first
			var last Operation
			if err := r.Watch(context.Background(), o.ID, 0, func(u Update) error { last = u.Operation; return nil }); err != nil && !errors.Is(err, ErrNotFound) {
				return err
			}
			if !o.Finished() {
				fmt.Println("ended", o.ID, told(last))
			}
		}
		begun, err := r.Start(context.Background(), Ask{Name: []string{"works", "fails"}[i%2], By: "test"})
		if errors.As(err, new(Refusal)) {
			i-- // the one before is just leaving
			continue
		}
		if err != nil {
			return err
		}
		fmt.Println("begun", begun.ID)
	}
}

// exhausted is beside the state of an operation of which a step was begun, or undone, as
// often as any may be: whatever its name, that fails it.
const exhausted = ", exhausted"

func told(o Operation) string {
	if slices.ContainsFunc(o.Steps, func(s Status) bool { return max(s.Attempts, s.UndoAttempts) >= maxAttempts }) {
		return string(o.State) + exhausted
	}
	return string(o.State)
}

// leaving is an operation whose steps leave something each.
func leaving(name string, count int, leave func(id, what string) error) Definition {
	all := func(r Request) (steps []Step, err error) {
		for i := range count {
			n := fmt.Sprint(i + 1)
			steps = append(steps, Step{
				ID: n, What: "leave " + n, Deadline: time.Minute,
				Run: func(_ context.Context, p *Progress) error {
					p.Report("at work")
					if err := leave(r.ID, n); err != nil {
						return err
					}
					if name == "fails" && n == "3" {
						return errors.New("as it is to")
					}
					return nil
				},
				Undo: func(context.Context, *Progress) error { return leave(r.ID, "undo "+n) },
			})
		}
		return steps, nil
	}
	return Definition{Name: name, Exclusive: true, Steps: all, Plan: func(_ context.Context, r Request) (Plan, error) {
		steps, err := all(r)
		return Plan{Steps: steps}, err
	}}
}

// The program that runs operations is killed at random points, over and over: what a
// boot finds is always a journal that can be read, each step is done at least once
// and in its order, and no operation that has begun, or ended, is lost.
func TestKilledWhileOperating(t *testing.T) {
	t.Parallel()
	top := t.TempDir()
	dir := filepath.Join(top, "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	// In the order in which they began. Who is killed before it says so leaves one that it
	// hasn't told of, and the next finds that before it begins another.
	var begun []string
	ended := map[string]string{}
	note := func(line string) {
		word, rest, _ := strings.Cut(line, " ")
		id, state, _ := strings.Cut(rest, " ")
		if !slices.Contains(begun, id) {
			begun = append(begun, id)
		}
		switch word {
		case "found":
			if before, over := ended[id]; over && before != state {
				t.Errorf("%s was %s, and is %s now", id, before, state)
			} else if state == string(Failed)+exhausted {
				ended[id] = state // nobody may have delivered of it at its end
			}
		case "begun":
		case "ended":
			ended[id] = state
		default:
			t.Fatal(line)
		}
	}
	for range kills {
		for _, line := range runAndKill(t, dir) {
			note(line)
		}
	}
	var found []string
	lines := runAndKill(t, dir, "begun")
	for _, line := range lines {
		if what, ok := strings.CutPrefix(line, "found "); ok {
			id, _, _ := strings.Cut(what, " ")
			found = append(found, id)
			note(line)
		}
	}
	for _, id := range begun[max(len(begun)-keptFinished, 0):] {
		if !slices.Contains(found, id) {
			t.Errorf("%s has begun, and is lost", id)
		}
	}
	for _, line := range lines {
		note(line)
	}
	broken, err := filepath.Glob(filepath.Join(dir, "*"+brokenSuffix))
	if err != nil || len(broken) > 0 {
		t.Errorf("journals that can't be read: %q, %v", broken, err)
	}
	seen := effects(t, filepath.Join(top, "effects"))
	gaveUp := 0
	for id, state := range ended {
		name, _, _ := strings.Cut(id, "-")
		if state, _, found := strings.Cut(state, ","); found {
			if gaveUp++; state != string(Failed) && state != string(Done) || !inOrder(seen[id]) {
				t.Errorf("%s was killed in one step again and again, is %s, and has left %q", id, state, seen[id])
			}
			delete(seen, id)
			continue
		}
		if want := map[string]string{"works": "done", "fails": "failed"}[name]; state != want {
			t.Errorf("%s is %s, want %s", id, state, want)
		}
		if got := slices.Compact(slices.Clone(seen[id])); !slices.Equal(got, stories[name]) {
			t.Errorf("%s has ended, and has left %q", id, seen[id])
		}
	}
	for id, left := range seen {
		name, _, _ := strings.Cut(id, "-")
		if got := slices.Compact(slices.Clone(left)); len(got) > len(stories[name]) || !slices.Equal(got, stories[name][:len(got)]) {
			t.Errorf("%s has left %q", id, left)
		}
	}
	t.Logf("%d kills, %d operations begun, %d seen to end, %d of them by too many kills in one step", kills, len(begun), len(ended), gaveUp)
}

// inOrder reports whether steps were done one after the other, and undone from the last
// one on.
func inOrder(left []string) bool {
	order := append(slices.Clone(stories["works"]), "undo 4", "undo 3", "undo 2", "undo 1")
	return slices.IsSortedFunc(left, func(a, b string) int { return slices.Index(order, a) - slices.Index(order, b) })
}

// effects are what the steps of each operation have left.
func effects(t *testing.T, path string) map[string][]string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string][]string{}
	for line := range strings.Lines(string(data)) {
		id, what, _ := strings.Cut(strings.TrimSpace(line), " ")
		seen[id] = append(seen[id], what)
	}
	return seen
}

// runAndKill runs the program until it has said one of these words, and a little
// more, kills it, and returns all its lines.
func runAndKill(t *testing.T, dir string, until ...string) []string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), operateIn+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	deadline := time.AfterFunc(eventually.Scale(time.Minute), func() { _ = cmd.Process.Kill() })
	defer deadline.Stop()
	read := bufio.NewReader(out)
	var said []string
	for {
		line, err := read.ReadString('\n')
		if err != nil {
			break
		}
		said = append(said, strings.TrimSpace(line))
		if word, _, _ := strings.Cut(line, " "); len(until) == 0 || slices.Contains(until, word) {
			break
		}
	}
	// at a point that nobody chose
	kill := time.AfterFunc(time.Duration(rand.IntN(40_000))*time.Microsecond, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	rest, err := io.ReadAll(read)
	if err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	for line := range strings.Lines(string(rest)) {
		if strings.HasSuffix(line, "\n") { // whole
			said = append(said, strings.TrimSpace(line))
		}
	}
	for _, line := range said {
		if strings.HasPrefix(line, "error:") {
			t.Fatal(line)
		}
	}
	return said
}
