//go:build e2e

// Package e2etest is the code that all end-to-end tests share. They boot whole nodes, from
// the same artefacts as `make up`. The end-to-end tests of one subject are a folder beside
// this one. They run only with the build tag "e2e".
//
// The cluster of a test has a directory and a name of its own, so that two
// tests never use the same one. It is removed when the test ends, however that
// happens. If a test fails, the end of the console is in its message.
package e2etest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/vm"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

const (
	homeVar = "GARBOARD_HOME" // qemu.Home
	// ownerVar has the PID of the test that a host process belongs to.
	ownerVar = "GARBOARD_E2E_PID"
	// Booted is the attribute of a test whose cluster has started; its value is
	// the provisioner. tools/dev counts with it what was really booted.
	Booted = "booted"
)

// Main is TestMain of a package of end-to-end tests: the test binary is also the program
// that a cluster starts as its host process, as `host --cluster NAME`. m is a *testing.M.
func Main(m interface{ Run() int }) {
	switch {
	case len(os.Args) == 4 && os.Args[1] == "host":
		os.Exit(callback(func(ctx context.Context) error { return host(ctx, os.Args[3]) }))
	case len(os.Args) == 2 && strings.HasPrefix(os.Args[1], sweepPrefix):
		os.Exit(callback(func(ctx context.Context) error { return sweep(ctx, strings.TrimPrefix(os.Args[1], sweepPrefix)) }))
	}
	// the go command doesn't end its tests when it ends
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGTERM), 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Setenv(ownerVar, strconv.Itoa(os.Getpid()))
	os.Unsetenv(homeVar) // tests must not use the user's clusters
	code := m.Run()
	if err := endShared(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}

func callback(f func(context.Context) error) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := f(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// host runs a cluster until its test ends. A test that was interrupted, or ran out of time,
// does not remove its cluster, so this does.
func host(ctx context.Context, cluster string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	owner, err := strconv.Atoi(os.Getenv(ownerVar))
	if err != nil {
		return fmt.Errorf("%s: %w", ownerVar, err)
	}
	test, err := unix.PidfdOpen(owner, 0)
	if err != nil {
		return fmt.Errorf("watch test %d: %w", owner, err)
	}
	var orphaned sync.WaitGroup
	orphaned.Go(func() {
		for {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(test), Events: unix.POLLIN}}, 1000)
			if n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
				break // the test has ended
			}
			if ctx.Err() != nil {
				return
			}
		}
		cancel()
	})
	err = qemu.Host(ctx, cluster, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	alone := ctx.Err() != nil && syscall.Kill(owner, 0) != nil
	cancel()
	orphaned.Wait()
	if alone {
		// The parent directory belongs to the test too, and is empty then.
		home := os.Getenv(homeVar)
		err = errors.Join(err, os.RemoveAll(home), os.Remove(filepath.Dir(home)))
	}
	return err
}

// builds are by provisioner: a container needs no kernel and no initramfs. The initramfs
// takes longest to make after a change of PID 1.
var builds = map[string]func() (*image.Artifacts, error){
	qemu.Container: sync.OnceValues(func() (*image.Artifacts, error) { return build(image.BuildRoot, image.Cloud) }),
	qemu.QEMU:      sync.OnceValues(func() (*image.Artifacts, error) { return build(image.Build, image.Cloud) }),
}

var buildMetal = sync.OnceValues(func() (*image.Artifacts, error) { return build(image.Build, image.Generic) })

func build(node image.Builder, flavour image.Flavour, optional ...string) (*image.Artifacts, error) {
	root, err := repository()
	if err != nil {
		return nil, err
	}
	return image.BuildAll(context.Background(), root, os.Stderr, node, flavour, optional...)
}

// further are the optional components of tests that aren't long: one set, so that there is
// one layout with all their images. tools/dev builds the same sets before it runs tests.
var further = []string{components.PodCheckpointer, components.RelinkedKubernetesVersion}

// OtherKubernetes makes a cluster of components.OtherKubernetesVersion. Its nodes can pull
// the images of both versions. Only long tests may use it: the build takes minutes.
func OtherKubernetes(t testing.TB) Option {
	t.Helper()
	return Kubernetes(t, components.OtherKubernetesVersion)
}

// Kubernetes is OtherKubernetes with any version of components.KubernetesVersions.
func Kubernetes(t testing.TB, version string) Option {
	t.Helper()
	return ofVersion(t, version, version)
}

// RelinkedKubernetes is the same with components.RelinkedKubernetesVersion: the code of the
// default version, under another version's name.
func RelinkedKubernetes(t testing.TB) Option {
	t.Helper()
	return ofVersion(t, components.RelinkedKubernetesVersion, further...)
}

func ofVersion(t testing.TB, version string, optional ...string) Option {
	t.Helper()
	a, err := build(image.BuildRoot, image.Cloud, optional...)
	if err != nil {
		t.Fatalf("build Kubernetes %s: %v", version, err)
	}
	return func(o *qemu.Options) {
		o.KubernetesVersion, o.Images, o.Kubernetes = version, a.Layout, []string{version}
	}
}

// Built builds the files that `make up` boots with a provisioner, once. It takes them from
// the cache if they are there.
func Built(t testing.TB, provisioner string) *image.Artifacts {
	t.Helper()
	a, err := builds[provisioner]()
	if err != nil {
		t.Fatalf("build what the test boots: %v", err)
	}
	return a
}

// Metal builds what machines boot with the kernel for bare metal. The option makes them boot
// it, with these devices, one entry for each node.
func Metal(t testing.TB, hardware ...vm.Hardware) (*image.Artifacts, Option) {
	t.Helper()
	made, err := buildMetal()
	if err != nil {
		t.Fatalf("build what the test boots: %v", err)
	}
	return made, func(o *qemu.Options) {
		o.Boot.Kernel, o.Boot.Initramfs, o.Hardware = made.Kernel, made.Initramfs, hardware
	}
}

// Medium builds an ISO with the kernel for bare metal. The option makes machines boot it. Loader,
// Release, Kernel and Initramfs of the options are set here, and Version unless it is given.
func Medium(t testing.TB, o media.Options) Option {
	t.Helper()
	path := buildMedium(t, media.ISO, o)
	return func(o *qemu.Options) { o.Boot.Medium = path }
}

// System is the system that Medium and Installer put into theirs with the same options.
func System(t testing.TB, o media.Options) []byte {
	t.Helper()
	content, err := os.ReadFile(buildMedium(t, media.UKI, o))
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// SystemdBoot is the boot loader that a system installs for UEFI.
func SystemdBoot(t testing.TB) []byte {
	t.Helper()
	boots := Parts(t).Loader
	content, err := boots.SystemdBoot()
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// InstallerHost is the registry in the names of installer images.
const InstallerHost = "images.example"

// Installer builds an installer image, as Medium does an ISO. It returns the directory with
// the OCI layout that has it, and its name.
func Installer(t testing.TB, o media.Options) (layout, ref string) {
	t.Helper()
	archive, layout := buildMedium(t, media.InstallerKind, o), t.TempDir()
	if out, err := exec.Command("tar", "-xf", archive, "-C", layout).CombinedOutput(); err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
	return layout, InstallerHost + "/garboard-os/installer:" + o.Version
}

// NetworkBoot builds the files for a boot over the network, and the installer image, as Medium does an ISO. Machines
// boot over HTTP, and are installed from the image, which the cluster's registry has.
func NetworkBoot(t testing.TB, o media.Options) Option {
	t.Helper()
	dir := buildMedium(t, media.PXE, o)
	layout, _ := Installer(t, o)
	return func(q *qemu.Options) {
		q.Boot.Network, q.Boot.Installer, q.InstallImage = dir, layout, media.InstallerImage(o.Version)
	}
}

// largerDisk is the size of a disk that an image is written to.
const largerDisk = 6 // GiB

// DiskImage builds the image of a disk, as Medium does an ISO. The option makes larger disks of machines begin with it.
func DiskImage(t testing.TB, o media.Options) Option {
	t.Helper()
	path := buildMedium(t, media.Disk, o)
	return func(o *qemu.Options) { o.DiskGiB, o.Boot.Disk = largerDisk, path }
}

// OwnDisk builds the image of a disk for each machine, with the configuration of the machine in it. The disk has
// nothing else to boot from, and the machine no other source of a configuration.
func OwnDisk(t testing.TB, o media.Options) Option {
	t.Helper()
	made := Parts(t).With(o)
	return func(q *qemu.Options) {
		q.Unconfigured, q.Hardware = true, []vm.Hardware{{Medium: vm.OwnDisk}}
		q.Prepare = func(dir string) (err error) {
			if made.Config, err = os.ReadFile(filepath.Join(dir, "config.yaml")); err != nil {
				return err
			}
			packed := filepath.Join(t.TempDir(), "garboard.raw.zst")
			if err := made.Build(t.Context(), media.Disk, packed); err != nil {
				return err
			}
			f, err := os.Create(filepath.Join(dir, "disk.img"))
			if err != nil {
				return err
			}
			defer f.Close()
			if err := vm.Unpack(f, packed, largerDisk<<30); err != nil {
				return err
			}
			return f.Truncate(largerDisk << 30)
		}
	}
}

func buildMedium(t testing.TB, kind string, o media.Options) string {
	t.Helper()
	o = Parts(t).With(o)
	path := filepath.Join(t.TempDir(), "garboard."+kind)
	if err := o.Build(t.Context(), kind, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// Parts are what media are made of, with the kernel for bare metal.
func Parts(t testing.TB) media.Options {
	t.Helper()
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	made, err := image.BuildMedia(t.Context(), root, t.Output(), image.Generic)
	if err != nil {
		t.Fatalf("build what the test boots: %v", err)
	}
	return made
}

// paces are of type func() eventually.Pace, by test.
var paces sync.Map

// Pace returns this machine's pace. It is measured at the test's first call, which is
// before its first cluster, because that may slow down the next one.
func Pace(t testing.TB) eventually.Pace {
	test, _, _ := strings.Cut(t.Name(), "/")
	measured, _ := paces.LoadOrStore(test, sync.OnceValue(eventually.Measure))
	return measured.(func() eventually.Pace)()
}

func repository() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}

// A Mark prints how long steps took, for the reader of the test's output.
type Mark struct {
	t     testing.TB
	start time.Time
	Steps []qemu.Milestone // so far, with the times since the start
}

// Marks returns a Mark that starts now.
func Marks(t testing.TB) *Mark { return &Mark{t: t, start: time.Now()} }

// Reached prints a step that is complete, with the time since the start.
func (m *Mark) Reached(what string) {
	m.t.Helper()
	m.Steps = append(m.Steps, qemu.Milestone{What: what, After: time.Since(m.start)})
	m.t.Logf("%7.1fs  %s", m.Took().Seconds(), what)
}

// Took is the time from the start to the last step.
func (m *Mark) Took() time.Duration { return m.Steps[len(m.Steps)-1].After }
