package configuration

import (
	"bufio"
	"bytes"
	"context"
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

	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// applyIn, set in the environment, makes the test program apply configurations to
// the STATE in that directory until it is killed.
const applyIn = "GARBOARD_TEST_APPLY_IN"

// thousand is how many configurations are applied in a row.
const thousand = 1000

func TestMain(m *testing.M) {
	if dir := os.Getenv(applyIn); dir != "" {
		if err := applyForever(dir); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// applyForever boots on a STATE, prints which configuration it found, and applies
// one after the other, in all modes. It says what it is about to apply, and what it has
// applied.
func applyForever(dir string) error {
	base, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "base.yaml"))
	if err != nil {
		return err
	}
	a := NewApplier(ApplierOptions{
		Store: resource.NewStore(), StateDir: dir, Log: slog.New(slog.DiscardHandler),
		Restart: func(context.Context, string, bool) error { return nil }, Reboot: func(string) {},
	})
	if err := a.stateFound(); err != nil {
		return err
	}
	text, err := os.ReadFile(a.stored.config())
	if err != nil {
		return err
	}
	if err := a.begin(source.State, text); err != nil {
		return err
	}
	stdout := bufio.NewWriter(os.Stdout)
	print := func(what, digest string) error {
		fmt.Fprintf(stdout, "%s %s\n", what, digest)
		return stdout.Flush()
	}
	if err := print("found", Digest(text)); err != nil {
		return err
	}
	for i := 0; ; i++ {
		next := with(base, fmt.Sprintf("n%d", rand.Uint32()))
		r := Request{Text: next, Mode: Auto, By: "test"}
		switch i % 5 {
		case 3:
			r.Mode = Try
		case 4:
			r.Mode = OnReboot
		}
		if err := print(string(r.Mode), Digest(next)); err != nil {
			return err
		}
		if _, err := a.Apply(context.Background(), r); err != nil {
			return err
		}
		if err := print("done", Digest(next)); err != nil {
			return err
		}
		if r.Mode == Try && i%2 == 0 {
			if err := print("confirm", Digest(next)); err != nil {
				return err
			}
			if err := a.Confirm(context.Background(), "test"); err != nil {
				return err
			}
			if err := print("confirmed", Digest(next)); err != nil {
				return err
			}
		} else if r.Mode == Try {
			if err := print("undo", Digest(text)); err != nil {
				return err
			}
			if _, err := a.Rollback(context.Background(), 0, Request{By: "test"}); err != nil {
				return err
			}
			if err := print("undone", Digest(text)); err != nil {
				return err
			}
		}
	}
}

// A thousand configurations in a row, and the program that applies them is killed
// at random points: what a boot finds then is always a configuration that was
// applied, whole, and the one that the modes promise.
func TestKilledWhileApplying(t *testing.T) {
	t.Parallel()
	base := document(t)
	top := t.TempDir()
	dir := filepath.Join(top, "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{filepath.Join(top, "base.yaml"): base, filepath.Join(dir, "config.yaml"): with(base, "first")} {
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	may := []string{Digest(with(base, "first"))}
	applied, kills := 0, 0
	for applied < thousand {
		lines := runAndKill(t, dir, 1+rand.IntN(60), time.Duration(rand.IntN(4000))*time.Microsecond)
		kills++
		if len(lines) == 0 {
			continue // killed before its first word
		}
		found, ok := strings.CutPrefix(lines[0], "found ")
		if !ok {
			t.Fatalf("it said %q", lines)
		}
		if !slices.Contains(may, found) {
			t.Fatalf("after kill %d the configuration is %s, which may be one of %q", kills, found, may)
		}
		for _, line := range lines {
			if strings.HasPrefix(line, "done ") {
				applied++
			}
		}
		may = outcomes(found, lines[1:])
	}
	t.Logf("%d configurations applied, %d kills", applied, kills)
	left, err := filepath.Glob(filepath.Join(dir, ".*"))
	if err != nil || len(left) > 1 {
		t.Errorf("left over: %q, %v", left, err)
	}
}

// outcomes are the digests that the next boot may find: of what was said to be
// done exactly one, of what was only begun either.
func outcomes(current string, lines []string) []string {
	next := []string{current} // what a boot makes of it now
	staged, before := "", current
	for _, line := range lines {
		what, name, _ := strings.Cut(line, " ")
		switch what {
		case "auto":
			// While it is being applied: the old one, or the staged one, or this one.
			next = []string{current, name}
			if staged != "" {
				next = append(next, staged)
			}
			before = name
		case "try":
			next = []string{current} // a boot undoes it
			if staged != "" {
				next = append(next, staged)
			}
			before = name
		case "on-reboot":
			next = []string{current, name}
			if staged != "" {
				next = append(next, staged)
			}
			before = ""
		case "done":
			if before == "" { // staged
				staged, next = name, []string{name}
				continue
			}
			staged = ""
			if slices.Contains(next, name) { // auto
				current, next = name, []string{name}
			} else { // try
				next = []string{current}
			}
		case "confirm":
			next = []string{current, name}
		case "confirmed":
			current, next = name, []string{name}
		case "undo", "undone":
			next = []string{current}
		}
	}
	return next
}

// runAndKill runs the applier until it has printed so many lines, and a little more,
// kills it, and returns all its lines.
func runAndKill(t *testing.T, dir string, lines int, more time.Duration) []string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), applyIn+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	deadline := time.AfterFunc(eventually.Scale(time.Minute), func() { _ = cmd.Process.Kill() })
	defer deadline.Stop()
	var printed []string
	read := bufio.NewReader(out)
	for len(printed) < lines {
		line, err := read.ReadString('\n')
		if err != nil {
			break
		}
		printed = append(printed, strings.TrimSpace(line))
	}
	kill := time.AfterFunc(more, func() { _ = cmd.Process.Kill() }) // at a point that nobody chose
	defer kill.Stop()
	rest, err := io.ReadAll(read)
	if err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	for line := range bytes.Lines(rest) {
		if bytes.HasSuffix(line, []byte("\n")) { // whole
			printed = append(printed, strings.TrimSpace(string(line)))
		}
	}
	for _, line := range printed {
		if strings.HasPrefix(line, "error:") {
			t.Fatal(line)
		}
	}
	return printed
}
