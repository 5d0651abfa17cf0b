//go:build e2e

package bench

import (
	"context"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/garboard-os/garboard/qemu/vm"
)

const (
	// installBudget is for a machine to boot from its medium, to install itself, and to boot from its disk.
	installBudget = 2 * time.Minute
	// budgetInstall is the RAM in which a machine has to install itself.
	budgetInstall = 1 << 30
	// sampleEvery is how often a node is asked for its memory, and sampleWait how long for an answer is waited.
	sampleEvery = 2 * time.Second
	sampleWait  = 5 * time.Second
)

// installLine is about a step of an installation.
var installLine = regexp.MustCompile(`^install-\S+ (verify|write): (running|done)`)

// install lets a machine install itself from a CD, with no more memory than a control plane needs. It is restarted with
// its system, and then with another one. Two more machines have their images from their medium, and from a registry
// mirror that has them, as a warm cache has.
func install(b *testing.B) {
	boots(b, qemu.QEMU)
	c, took, used := installed(b, "bench-install", media.Options{}, func(*qemu.Options) {})
	var write, began time.Duration
	for _, line := range c.Lines(0) {
		step := installLine.FindStringSubmatch(line.Text)
		if step != nil && step[2] == "done" {
			write = line.At - began
			report(b, of(seconds, "install: "+step[1]+" the system", write))
		}
		if step != nil {
			began = line.At
		}
	}
	if write <= 0 {
		b.Error("the console has no complete step of an installation")
	}
	what := "install: write the system, against dd of the medium to a file beside the machine's disk"
	if c.Accelerator == "tcg" {
		what += " (the machine is emulated, and dd isn't)"
	}
	dd := copied(b, c)
	report(b,
		figure{what: what, value: fmt.Sprintf("%.1f × %s", write.Seconds()/dd.Seconds(), seconds(dd))},
		used.figure(fmt.Sprintf("install: most memory in use, of %d MiB, until the restart", controlPlaneMiB), budgetInstall),
		of(seconds, "install: power-on → node Ready, from its disk, images from a registry", took))
	restarts(b, c)
	c.Down() // two emulated machines at a time would slow down each other

	source := httptest.NewServer(registry.New(e2etest.Built(b, qemu.QEMU).Layout))
	defer source.Close()
	bundle := filepath.Join(b.TempDir(), "images.tar")
	e2etest.Gbctl(b, "images", "bundle", "-O", bundle, "--registry-mirror", "*="+source.URL)
	for _, from := range []struct {
		name, where string
		medium      media.Options
		mirrors     map[string][]string
	}{
		{"bench-bundled", "the medium", media.Options{Images: bundle}, nil},
		{"bench-mirrored", "a registry mirror that has them (--registry-mirror)", media.Options{}, map[string][]string{"*": {source.URL}}},
	} {
		c, other, _ := installed(b, from.name, from.medium, func(o *qemu.Options) { o.Mirrors = from.mirrors })
		c.Down()
		report(b, figure{what: "install: the same, images from " + from.where, value: fmt.Sprintf("%s, %.2f of that", seconds(other), float64(other)/float64(took))})
	}
}

// installed makes a machine that installs itself from a CD. It returns how long that took until the node was Ready, and
// the memory in use meanwhile.
func installed(b *testing.B, name string, o media.Options, change e2etest.Option) (*e2etest.Cluster, time.Duration, memory) {
	b.Helper()
	choice, err := qemu.Choose(b.Context(), qemu.QEMU)
	if err != nil {
		b.Fatal(err)
	}
	o.Args = append([]string{"console=ttyS0", "panic=-1"}, vm.KernelArgs(choice.Accelerator)...)
	layout, _ := e2etest.Installer(b, media.Options{Args: o.Args, Version: e2etest.Parts(b).Version})
	c, m := e2etest.Start(b, name, qemu.QEMU, e2etest.Medium(b, o), func(q *qemu.Options) { q.Boot.Installer, q.MemoryMiB = layout, controlPlaneMiB }, change)
	used := sample(b, c, func() {
		c.Says(installBudget, 0, "runs from slot A, which is trying")
		m.Reached("the disk boots")
		c.Ready(m)
	})
	return c, m.Took(), used
}

// sample asks a node for its memory while do runs. The node may be starting, or restarting.
func sample(b *testing.B, c *e2etest.Cluster, do func()) (used memory) {
	b.Helper()
	machine, err := client.Dial(c.Access(), c.Nodes[0].Address.String())
	if err != nil {
		b.Fatal(err)
	}
	defer machine.Close()
	ctx, cancel := context.WithCancel(b.Context())
	sampled := make(chan struct{})
	go func() {
		defer close(sampled)
		for ctx.Err() == nil {
			asked, done := context.WithTimeout(ctx, sampleWait)
			if s, err := client.Unary(asked, machine.Node.Status, &garboardv1.NodeStatusRequest{}); err == nil {
				used.add(s.GetBootId(), s.GetMemoryTotal(), s.GetMemoryAvailable())
			}
			done()
			select {
			case <-ctx.Done():
			case <-time.After(sampleEvery):
			}
		}
	}()
	end := sync.OnceFunc(func() {
		cancel()
		<-sampled
	})
	defer end() // do may end the benchmark
	do()
	end()
	return used
}

// copied is how long dd needs for the medium. The machine has read it before it writes, and so has dd: the second copy
// counts.
func copied(b *testing.B, c *e2etest.Cluster) (took time.Duration) {
	b.Helper()
	to := filepath.Join(c.Dir(), "copy")
	defer os.Remove(to)
	for range 2 {
		start := time.Now()
		if out, err := exec.CommandContext(b.Context(), "dd", "if="+c.Boot.Medium, "of="+to, "bs=4M", "conv=fsync").CombinedOutput(); err != nil {
			b.Fatalf("dd: %v: %s", err, out)
		}
		took = time.Since(start)
	}
	return took
}

// restarts restarts an installed machine with its system, and then with another one.
func restarts(b *testing.B, c *e2etest.Cluster) {
	b.Helper()
	reboot := operate(b, c, "reboot", "--wait")
	report(b,
		of(seconds, "reboot of this machine: no API server for", reboot.longest),
		of(seconds, "reboot of this machine, until the operation has ended, images on its disk", reboot.took))
	var upgrade operated
	used := sample(b, c, func() { upgrade = operate(b, c, "upgrade", "--image", media.InstallerImage(e2etest.Parts(b).Version)) })
	report(b,
		figure{what: "upgrade of this machine: no API server for", value: fmt.Sprintf("%s, %.2f of a reboot", seconds(upgrade.longest), float64(upgrade.longest)/float64(reboot.longest))},
		of(seconds, "upgrade of this machine, until it is known to be healthy", upgrade.took),
		used.figure(fmt.Sprintf("upgrade of this machine: most memory in use, of %d MiB, until the restart, with Kubernetes", controlPlaneMiB)))
}
