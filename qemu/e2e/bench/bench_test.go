//go:build e2e

// Package bench measures what docs/design.md has budgets for. make bench runs each benchmark
// once. A figure over its budget fails its benchmark.
package bench

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/customize"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

var (
	provisioner = flag.String("provisioner", qemu.Auto, "what to boot: qemu, container, or auto for both")
	clusters    = flag.Int("clusters", 1, "how many clusters of several containers are made, one after the other")
)

// boots skips a benchmark that boots what isn't asked for, or can't be had: container nodes need root.
func boots(b *testing.B, what string) {
	b.Helper()
	if *provisioner != qemu.Auto && *provisioner != what {
		b.Skip("-provisioner " + *provisioner)
	}
	if what == qemu.Container && os.Geteuid() != 0 {
		b.Skip("container nodes need root")
	}
}

// measured are the figures so far.
var measured []figure

func TestMain(m *testing.M) { e2etest.Main(printing{m}) }

// printing prints the table after the benchmarks, also where one has failed.
type printing struct{ *testing.M }

func (p printing) Run() int {
	code := p.M.Run()
	if len(measured) == 0 {
		return code // only tests ran
	}
	fmt.Println()
	if err := table(os.Stdout, measured); err != nil {
		return 1
	}
	return code
}

func report(b *testing.B, figures ...figure) {
	b.Helper()
	for _, f := range figures {
		measured = append(measured, f)
		if f.over {
			b.Errorf("%s: %s, %s is allowed", f.what, f.value, f.budget)
		}
	}
}

// The order of these is that of the table.

func BenchmarkSizes(b *testing.B) {
	made := e2etest.Built(b, qemu.QEMU)
	report(b,
		of(megabytes, "PID 1 binary, stripped", size(b, made.Init), 36e6),
		of(megabytes, "kernel + initramfs with root filesystem", size(b, made.Kernel, made.Initramfs), 66e6))
}

// BenchmarkMedia makes a medium of each kind, and customizes a system: a file is added, and some modules are removed.
func BenchmarkMedia(b *testing.B) {
	o, dir := e2etest.Parts(b), b.TempDir()
	for _, kind := range media.Kinds {
		path, start := filepath.Join(dir, kind), time.Now()
		if err := o.Build(b.Context(), kind, path); err != nil {
			b.Fatal(err)
		}
		took := time.Since(start)
		report(b, figure{what: "medium: " + kind, value: megabytes(size(b, path)) + ", made in " + seconds(took)})
	}
	system, overlay := b.TempDir(), b.TempDir()
	e2etest.WriteFile(b, filepath.Join(overlay, "file"), []byte("file\n"))
	if err := o.Directory(system); err != nil {
		b.Fatal(err)
	}
	start := time.Now()
	if err := (customize.Change{
		Remove:   []string{"/usr/lib/modules/" + o.Release + "/kernel/drivers/usb/serial"},
		Overlays: []customize.Overlay{{Name: "overlay", Dir: overlay}},
	}).Apply(b.Context(), system, func(string) {}); err != nil {
		b.Fatal(err)
	}
	report(b, of(seconds, "customization: a file added, modules removed", time.Since(start)))
}

func BenchmarkContainer(b *testing.B) {
	c, how := node(b, qemu.Container)
	idle(b, c)
	gbctlVersion(b, c)
	load(b, c)
	patch(b, c) // the last: it leaves an API server that starts anew
	chart(b, c, how)
}

func BenchmarkSeveralContainers(b *testing.B) { several(b) }

func BenchmarkSharedAddress(b *testing.B) { shared(b) }

func BenchmarkOperations(b *testing.B) { operations(b) }

func BenchmarkQEMU(b *testing.B) {
	c, how := node(b, qemu.QEMU)
	// It would not be here if it hadn't got Ready in that.
	report(b, figure{what: how + ": RAM of this control plane", value: fmt.Sprintf("%d MiB", controlPlaneMiB), budget: "≤ 2 GiB"})
	chart(b, c, how)
}

func BenchmarkInstall(b *testing.B) { install(b) }

// size is the size of all files in these places.
func size(b *testing.B, paths ...string) (total int64) {
	b.Helper()
	for _, path := range paths {
		if err := filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			info, err := d.Info()
			if err == nil {
				total += info.Size()
			}
			return err
		}); err != nil {
			b.Fatal(err)
		}
	}
	return total
}
