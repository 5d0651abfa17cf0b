package qemu

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu/container/snapshot"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const (
	kills = 24
	// upTime is longer than it takes to make this test's cluster: kills are spread over it.
	upTime = 1200 * time.Millisecond
	// killsQEMU are fewer, because only the way to run nodes differs.
	killsQEMU = 10
	// downPromise is how long the removal of a cluster may take.
	downPromise = 10 * time.Second
)

// wish is the cluster that a process has to make before it is killed.
type wish struct {
	Name, Images           string
	Choice                 Choice
	Boot                   Boot
	ControlPlanes, Workers int
	MemoryMiB              int
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
	return Options{
		Name: w.Name, Provisioner: w.Choice.Name, Choice: w.Choice, Boot: w.Boot, Images: w.Images,
		ControlPlanes: w.ControlPlanes, Workers: w.Workers, MemoryMiB: w.MemoryMiB, Self: []string{os.Args[0]},
	}
}

// After a kill of any process at any time, Up makes the cluster, and Down
// removes all of it, within the time limit.
func TestKilledWhileAClusterIsMade(t *testing.T) {
	o := artefacts(t)
	w := wish{Name: "rubble", Choice: Choice{Name: Container}, Images: o.Images, Boot: o.Boot, ControlPlanes: 3, Workers: 1}
	surviveKills(t, w, kills, func(c *Cluster) { expect(t, c, "who", "rubble-controlplane-") })
}

// The same with machines. Their kernel only halts.
func TestKilledWhileMachinesAreMade(t *testing.T) {
	o := artefacts(t)
	o.Boot = idleKernel(t)
	w := wish{
		Name: "rubble-qemu", Choice: Choice{Name: QEMU, Accelerator: "tcg"}, Images: o.Images, Boot: o.Boot,
		ControlPlanes: 1, Workers: 1, MemoryMiB: 64,
	}
	surviveKills(t, w, killsQEMU, func(c *Cluster) {
		all, err := c.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range all {
			if n.State != stateRunning {
				t.Errorf("%s is %q: %s", n.Name, n.State, n.Error)
			}
		}
		eventually.That(t, downPromise, "only its own processes are there", func() error {
			if all := snapshot.Take(t, c.Name)[snapshot.Processes]; len(all) != 1+len(c.Nodes) {
				return fmt.Errorf("a host process and %d machines are %q", len(c.Nodes), all)
			}
			return nil
		})
	})
}

// idleKernel is a file that QEMU accepts as a Linux kernel (Documentation/arch/x86/boot.rst).
func idleKernel(t *testing.T) Boot {
	t.Helper()
	const sectors, start = 4, 0x280 // of its setup code
	b := make([]byte, 32<<10)
	b[0x1f1] = sectors
	copy(b[0x1fe:], []byte{0x55, 0xaa})                   // boot_flag
	copy(b[0x200:], []byte{0xeb, start - 0x202})          // a jump over the header
	copy(b[0x202:], "HdrS\x0c\x02")                       // version 2.12
	b[0x211] = 1                                          // loadflags: loaded high
	binary.LittleEndian.PutUint32(b[0x22c:], 0x37ff_ffff) // initrd_addr_max
	copy(b[start:], []byte{0xfa, 0xf4, 0xeb, 0xfd})       // cli; hlt; jmp to hlt
	dir := t.TempDir()
	boot := Boot{Kernel: filepath.Join(dir, "vmlinuz"), Initramfs: filepath.Join(dir, "initramfs")}
	if err := errors.Join(os.WriteFile(boot.Kernel, b, 0o600), os.WriteFile(boot.Initramfs, []byte("nothing"), 0o600)); err != nil {
		t.Fatal(err)
	}
	return boot
}

// surviveKills kills the process that makes or removes a cluster, some times;
// made checks each cluster that is made again afterwards.
func surviveKills(t *testing.T, w wish, kills int, made func(*Cluster)) {
	t.Helper()
	pace := eventually.Measure()
	t.Setenv("GARBOARD_HOME", t.TempDir())
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
			if len(c.Nodes) != w.ControlPlanes+w.Workers {
				t.Fatalf("%s: it has %d nodes", what, len(c.Nodes))
			}
			made(c)
		}
		start := time.Now()
		if err := Down(t.Context(), w.Name); err != nil {
			t.Fatalf("%s: removed: %v", what, err)
		}
		if err := pace.Kept(start, time.Now(), downPromise); err != nil {
			t.Errorf("%s: removed: %v", what, err)
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

// killUp starts a cluster, and kills one of the two processes that do it, if
// they haven't ended by then.
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
			// It may not exist yet, or have ended.
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
