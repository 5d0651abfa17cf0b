//go:build kernel

package services

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/operations/lifecycle"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/slots"
	"github.com/garboard-os/garboard/tools/testing/bootloader"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/signer"
)

// installers are images whose files are in a directory. On a node, containerd has them.
type installers string

func (i installers) Fetch(_ context.Context, _ string, report func(done, of int64)) error {
	report(1, 1)
	return nil
}

func (i installers) Files(_ context.Context, _ string, use func(fs.FS) error) error {
	return use(os.DirFS(string(i)))
}

func (installers) Forget(context.Context) error { return nil }

// rest is the service that stands for all others of a node. It isn't up on one that is sick.
const rest = "rest"

// A booted is one boot of a machine: a worker with the services and operations that a new system needs.
type booted struct {
	*Node
	t     *testing.T
	c     *computer
	power chan string
	stop  func()
}

// boot starts what PID 1 starts, with this command line of the kernel.
func (c *computer) boot(line string, images installers, sick bool) *booted {
	t := c.t
	t.Helper()
	cmdline := boot.ParseCmdline(line)
	var console buffer
	l, store, table := logs.New(&console), resource.NewStore(), process.New()
	b := &booted{t: t, c: c, power: make(chan string, 1)}
	n := &Node{Store: store, logs: l, power: func(p boot.Power, why string) {
		select {
		case b.power <- string(p) + ": " + why:
		default:
		}
	}}
	b.Node = n
	c.must(kubelet.NodeHealths.Put(store.As("test"), kubelet.HealthID, kubelet.NodeHealth{Serves: "yes"}))
	_, installed := cmdline.Get(boot.ParamSlot)
	applier := configuration.NewApplier(configuration.ApplierOptions{
		Trial: cmdline.Fallback(), Back: cmdline.Back(), Store: store, Log: l.Logger(configuration.ID),
		Restart: func(ctx context.Context, id string, _ bool) error { return n.graph.Restart(ctx, id) },
		Reboot:  func(why string) { n.power(boot.Reboot, why) },
		Place:   func(install config.Install) (string, error) { return n.disks.Place(install) },
	})
	n.disks = disks.New(disks.Options{Installed: installed, Store: store, Processes: table, Logs: l, Plugins: boot.CNIPlugins, StateReady: func() error {
		err := errors.Join(applier.StateReady(), applier.RecordBoot(n.slots.Running(), ""))
		n.ops.Open()
		return err
	}})
	n.slots = slots.New(slots.Options{
		Cmdline: cmdline, Store: store, Disks: n.disks, Images: images, Panicked: func() string { return "" }, Processes: table, Log: l.Logger(slots.ID),
	})
	var err error
	n.ops, err = operation.New(operation.Options{Store: store, Log: l.Logger(operation.ID), Dir: boot.OperationsDir, Definitions: lifecycle.Definitions(lifecycle.Options{
		Store: store, Systems: n.slots, Unhealthy: n.unhealthy, Power: n.power, MarkWipe: n.disks.MarkWipe, Holds: func() bool { return n.ops.Holds() },
	})})
	c.must(err)
	services := []dag.Service{
		configuration.Service(configuration.Options{Store: store, Applier: applier, MountState: n.disks.MountState, Installed: installed, Sources: []source.Source{c.configuration()}}),
		n.disks.Service(), c.formatted(n), slots.Service(slots.ServiceOptions{Slots: n.slots, Install: n.install}), restOf(sick),
	}
	for i := range services[1:] { // the order of node.go
		services[i+1].DependsOn = []string{services[i].ID}
	}
	n.graph, err = dag.New(dag.Options{Log: l.Logger}, services...)
	c.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { n.prove(ctx, n.slots) })
	wg.Go(func() { _ = n.ops.Run(ctx) })
	wg.Go(func() { _ = n.graph.Run(ctx) })
	b.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(func() {
		b.stop()
		if t.Failed() {
			t.Logf("boot with %s:\n%s\n%s", line, &console, strings.Join(l.Tail(disks.ID, 20), "\n"))
		}
	})
	return b
}

// configuration is that of a worker.
func (c *computer) configuration() source.Source {
	secrets, err := config.NewSecrets(time.Now())
	c.must(err)
	made, err := config.Generate(config.Options{ClusterName: "test", Type: config.Worker, Endpoint: "https://10.5.0.2:6443", Secrets: secrets})
	c.must(err)
	made.Machine.Install = config.Install{Disk: systemDisk}
	text, err := made.Encode()
	c.must(err)
	return source.Source{Name: "test", Read: func(context.Context) ([]byte, error) { return text, nil }}
}

// formatted is a task that makes the file system of a new EFI system partition.
func (c *computer) formatted(n *Node) dag.Service {
	return dag.Service{ID: "formatted", Restart: dag.RestartOnError, Run: func(context.Context, *dag.Handle) error {
		if !n.disks.Known() {
			c.format(efiDevice, boot.LabelEFI)
		}
		return nil
	}}
}

func restOf(sick bool) dag.Service {
	return dag.Service{ID: rest, Run: func(ctx context.Context, h *dag.Handle) error {
		if !sick {
			h.Started("healthy")
		}
		<-ctx.Done()
		return nil
	}}
}

type buffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// restarts waits until the node restarts the machine, and lets it.
func (b *booted) restarts() {
	b.t.Helper()
	eventually.That(b.t, time.Minute, "the machine restarts", func() error {
		select {
		case why := <-b.power:
			if !strings.HasPrefix(why, string(boot.Reboot)) {
				b.t.Errorf("the machine ends: %s", why)
			}
			return nil
		default:
		}
		var states []string
		for _, s := range b.graph.Statuses() {
			states = append(states, fmt.Sprintf("%s is %s: %s", s.ID, s.State, s.Message))
		}
		return errors.New(strings.Join(states, "; "))
	})
	b.stop()
}

// asks for an operation, which restarts the machine.
func (b *booted) asks(name string, args any) (id string) {
	b.t.Helper()
	o, err := b.ops.Start(b.t.Context(), operation.Ask{Name: name, By: "somebody", Arguments: args})
	b.c.must(err)
	b.restarts()
	return o.ID
}

// is waits for what META says of both slots.
func (b *booted) is(running, want string) {
	b.t.Helper()
	eventually.That(b.t, 40*time.Second, "the slots are "+want, func() error {
		all, err := b.slots.Get()
		if err != nil {
			return err
		}
		if got := fmt.Sprintf("A %s %s, B %s %s", all.A.State, all.A.Version, all.B.State, all.B.Version); got != want || b.slots.Running() != running || !b.slots.Begun() {
			return fmt.Errorf("%q runs, begun %v, and they are %s", b.slots.Running(), b.slots.Begun(), got)
		}
		return nil
	})
}

// ended waits for the end of an operation that the boot before has begun.
func (b *booted) ended(id string, state operation.State, reason string) {
	b.t.Helper()
	eventually.That(b.t, 30*time.Second, "the operation is "+string(state), func() error {
		o, err := b.ops.Get(id)
		if err == nil && (o.State != state || !strings.Contains(o.Error, reason)) {
			err = fmt.Errorf("it is %s: %s", o.State, o.Error)
		}
		return err
	})
}

// A loader is systemd-boot or GRUB.
type loader func(fs.FS) (bootloader.Start, error)

// boots lets a boot loader start a system, and starts what the slot's command line says.
func (c *computer) boots(by loader, version, slot string, images installers, sick bool) *booted {
	c.t.Helper()
	got, line := c.start(by)
	if got != version || !strings.HasSuffix(line, boot.ParamSlot+"="+strings.Replace(slot, " ", " "+boot.ParamTrial, 1)) {
		c.t.Fatalf("the boot loader starts %s with %q, want %s from slot %s", got, line, version, slot)
	}
	return c.boot(line, images, sick)
}

// The life of a machine on a real disk: from a stick, a new system installs itself; it upgrades itself, and rolls back;
// and an upgrade to a system that isn't healthy, and to one that doesn't start at all, ends with the former system.
// Each boot is from what a boot loader would start, in turns systemd-boot and GRUB, with its command line. The
// partitions, their file systems, META, the program of each new system, the operations with their journals, and the
// proof of health are real; the kernels aren't.
func TestSystemsOnADisk(t *testing.T) {
	c := newComputer(t)
	c.format(stick, boot.MediumLabel)
	c.with(stick, func(dir string) error { c.release(dir, "v1.0.0", signer.Release); return nil })
	image := installers(t.TempDir())
	files := filepath.Join(string(image), esp.InstallDir)
	c.must(os.MkdirAll(files, 0o755))
	upgrade := &apiv1.UpgradeSystemRequest{Force: true, Image: "registry.test/installer"}

	c.boot("quiet garboard.platform=metal", image, false).restarts() // installed
	b := c.boots(bootloader.SystemdBoot, "v1.0.0", "A =alone", image, false)
	b.is("A", "A good v1.0.0, B empty ")
	b.refuses(files)
	c.must(os.WriteFile(filepath.Join(boot.EphemeralDir, "kept"), nil, 0o600))

	c.release(files, "v2.0.0", signer.Release)
	id := b.asks(lifecycle.Upgrade, upgrade)
	b = c.boots(bootloader.GRUB, "v2.0.0", "B ", image, false)
	b.is("B", "A good v1.0.0, B good v2.0.0")
	b.ended(id, operation.Done, "")
	id = b.asks(lifecycle.Rollback, &apiv1.RollbackSystemRequest{Force: true})
	b = c.boots(bootloader.SystemdBoot, "v1.0.0", "A =back", image, false)
	b.is("A", "A good v1.0.0, B good v2.0.0")
	b.ended(id, operation.Done, "")

	// The machine is reset while the new system isn't healthy.
	c.release(files, "v3.0.0", signer.Release)
	id = b.asks(lifecycle.Upgrade, upgrade)
	b = c.boots(bootloader.GRUB, "v3.0.0", "B ", image, true)
	b.is("B", "A good v1.0.0, B trying v3.0.0")
	b.stop()
	b = c.boots(bootloader.SystemdBoot, "v1.0.0", "A", image, false)
	b.is("A", "A good v1.0.0, B bad v3.0.0")
	b.ended(id, operation.Failed, "slot B is bad: it was started, and didn't become healthy before the machine restarted")

	// The kernel of the new system dies before it has its disk: only the boot loader has counted that.
	c.release(files, "v4.0.0", signer.Release)
	id = b.asks(lifecycle.Upgrade, upgrade)
	if got, _ := c.start(bootloader.SystemdBoot); got != "v4.0.0" {
		t.Fatalf("the boot loader starts %s", got)
	}
	b = c.boots(bootloader.SystemdBoot, "v1.0.0", "A", image, false)
	b.is("A", "A good v1.0.0, B bad v4.0.0")
	b.ended(id, operation.Failed, "slot B is bad: ")
	b.looksBack(",A,B,A,B,A,A")
}

// refuses checks that the machine doesn't run a byte of what nobody has vouched for, and keeps its slots as they are.
func (b *booted) refuses(files string) {
	b.t.Helper()
	var before string
	eventually.That(b.t, 20*time.Second, "the boot loader knows that A is good", func() error {
		var err error
		if before, err = b.systems(); err == nil && !strings.Contains(before, "garboard-a.conf ") {
			err = errors.New(before)
		}
		return err
	})
	refused := func(name string, args any, reason string) {
		b.t.Helper()
		o, err := b.ops.Start(b.t.Context(), operation.Ask{Name: name, By: "somebody", Arguments: args})
		b.c.must(err)
		b.ended(o.ID, operation.Failed, reason)
		b.is("A", "A good v1.0.0, B empty ")
		if after, err := b.systems(); err != nil || after != before {
			b.t.Errorf("%s: the EFI system partition has %s, and had %s", reason, after, before)
		}
	}
	upgrade := &apiv1.UpgradeSystemRequest{Force: true, Image: "registry.test/installer"}
	b.c.release(files, "v2.0.0", "somebody else")
	refused(lifecycle.Upgrade, upgrade, "isn't signed by one of the 1 keys that this machine trusts, or was changed since")
	b.c.must(os.Remove(filepath.Join(files, signed.SignatureFile)))
	refused(lifecycle.Upgrade, upgrade, "release v2.0.0 isn't signed: nothing of it is run")
	b.c.release(files, "v0.9.0", signer.Release)
	refused(lifecycle.Upgrade, upgrade, "release v0.9.0 is older than v1.0.0, which was healthy on this machine")
	b.c.release(files, "v2.0.0", signer.Release)
	system := filepath.Join(files, "garboard.efi")
	content, err := os.ReadFile(system)
	b.c.must(err)
	content[len(content)/2] ^= 1
	b.c.must(os.WriteFile(system, content, 0o600))
	refused(lifecycle.Upgrade, upgrade, "its system has the SHA-256")
	b.c.must(os.Remove(system))
	b.c.must(os.Symlink("/proc/self/exe", system))
	refused(lifecycle.Upgrade, upgrade, "garboard.efi is no regular file")
	b.c.must(os.Remove(system))
}

// systems are the names and sizes of what lies in the EFI system partition.
func (b *booted) systems() (all string, err error) {
	err = b.disks.UseEFI(b.t.Context(), func(dir string) error {
		return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				info, err := d.Info()
				b.c.must(err)
				all += fmt.Sprintf("%s %d\n", path, info.Size())
			}
			return err
		})
	})
	return all, err
}

// looksBack ends the boot, and checks what is left of all of them.
func (b *booted) looksBack(want string) {
	b.t.Helper()
	var from []string
	for _, o := range configuration.Boots.List(b.Store) {
		from = append(from, o.Spec.Slot)
	}
	if got := strings.Join(from, ","); got != want {
		b.t.Errorf("the machine was booted from %s", got)
	}
	if _, err := os.Stat(filepath.Join(boot.EphemeralDir, "kept")); err != nil {
		b.t.Error(err)
	}
	b.stop()
	if got := b.c.entries(); got != "garboard-a.conf garboard-b+0.conf" {
		b.t.Error(got)
	}
}
