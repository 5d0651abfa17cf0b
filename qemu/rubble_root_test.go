package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot/eventually"
	"github.com/garboard-os/garboard/qemu/snapshot"
)

const (
	kills = 24
	// upTime is more than making the cluster of this test takes: kills are spread over it.
	upTime = 1200 * time.Millisecond
	// downPromise is how long the removal of a cluster may take.
	downPromise = 10 * time.Second
)

// wish is what a process that is going to be killed is to bring up.
type wish struct {
	Name, Images           string
	Boot                   Boot
	ControlPlanes, Workers int
}

func upAsTold(ctx context.Context, text string) error {
	var w wish
	if err := json.Unmarshal([]byte(text), &w); err != nil {
		return err
	}
	_, err := Up(ctx, w.options())
	return err
}

func (w wish) options() Options {
	return Options{Name: w.Name, Provisioner: Container, Boot: w.Boot, Images: w.Images, ControlPlanes: w.ControlPlanes, Workers: w.Workers, Self: []string{os.Args[0]}}
}

// Whatever is killed at whatever moment: making the cluster again makes it, removing it
// removes all of it, and in time.
func TestKilledWhileAClusterIsMade(t *testing.T) {
	o := artefacts(t)
	t.Setenv("GARBOARD_HOME", t.TempDir())
	w := wish{Name: "rubble", Images: o.Images, Boot: o.Boot, ControlPlanes: 3, Workers: 1}
	before := snapshot.Take(t, w.Name)
	t.Cleanup(func() {
		if err := Down(context.Background(), w.Name); err != nil {
			t.Error(err)
		}
	})
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	victims := map[string]int{}
	for i := range kills {
		victim := []string{"client, SIGINT", "client, SIGKILL", "host process", "client removing it"}[random.IntN(4)]
		after := time.Duration(random.Int64N(int64(upTime)))
		what := fmt.Sprintf("kill %d: %s after %s", i, victim, after)
		if victim == "client removing it" {
			after /= 2
			killRemoval(t, w, after)
		} else {
			killUp(t, w, victim, after)
		}
		victims[victim]++
		if random.IntN(2) == 0 {
			c, err := Up(t.Context(), w.options())
			if err != nil {
				t.Fatalf("%s: made again: %v", what, err)
			}
			if len(c.Nodes) != 4 {
				t.Fatalf("%s: it has %d nodes", what, len(c.Nodes))
			}
			expect(t, c, "who", "rubble-controlplane-")
		}
		start := time.Now()
		if err := Down(t.Context(), w.Name); err != nil {
			t.Fatalf("%s: removed: %v", what, err)
		}
		if took, limit := time.Since(start), eventually.Scale(downPromise); took > limit {
			t.Errorf("%s: removed in %s, the promise is %s", what, took, limit)
		}
		eventually.That(t, downPromise, "nothing is left behind", func() error {
			if diff := before.Diff(snapshot.Take(t, w.Name)); diff != "" {
				return errors.New(what + ":\n" + diff)
			}
			return nil
		})
	}
	t.Logf("%v", victims)
}

// killUp brings a cluster up, and kills one of the two processes that do it, if they
// haven't ended by then.
func killUp(t *testing.T, w wish, victim string, after time.Duration) {
	t.Helper()
	text, err := json.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	during(t, after, func(client *os.Process) {
		switch victim {
		case "client, SIGINT":
			_ = client.Signal(syscall.SIGINT)
		case "client, SIGKILL":
			_ = client.Kill()
		default:
			// There may be none yet, or none any more.
			if d, err := dirOf(w.Name); err == nil {
				if pid, err := holder(d.lock()); err == nil && pid != 0 {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
		}
	}, "up", string(text))
}

// killRemoval stops the removal of a cluster in the middle.
func killRemoval(t *testing.T, w wish, after time.Duration) {
	t.Helper()
	if _, err := Up(t.Context(), w.options()); err != nil {
		t.Fatal(err)
	}
	during(t, after, func(client *os.Process) { _ = client.Kill() }, "down", w.Name)
}

// during starts this program, and does something while it runs.
func during(t *testing.T, after time.Duration, do func(*os.Process), args ...string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait()
	}()
	select {
	case <-ended:
	case <-time.After(after):
	}
	do(cmd.Process)
	<-ended
}
