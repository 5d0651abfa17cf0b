package udev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

func TestParseUevent(t *testing.T) {
	message := "add@/devices/pci0000:00/0000:00:02.0\x00ACTION=add\x00DEVPATH=/devices/pci0000:00/0000:00:02.0\x00SUBSYSTEM=pci\x00PCI_ID=1AF4:1000\x00MODALIAS=pci:v00001AF4d00001000sv00001AF4sd00000001bc02sc00i00\x00SEQNUM=1234\x00"
	got, ok := parseUevent([]byte(message))
	want := Uevent{
		Action: "add", DevPath: "/devices/pci0000:00/0000:00:02.0", Subsystem: "pci",
		Modalias: "pci:v00001AF4d00001000sv00001AF4sd00000001bc02sc00i00", Seq: 1234,
	}
	if d := cmp.Diff(want, got); d != "" || !ok {
		t.Errorf("%v (-want +got):\n%s", ok, d)
	}
	node, _ := parseUevent([]byte("add@/devices/x\x00ACTION=add\x00DEVPATH=/devices/x\x00DEVNAME=input/event0\x00"))
	if node.DevName != "input/event0" {
		t.Errorf("got %+v", node)
	}
	for _, bad := range []string{"", "libudev\x00\xfe\xed", "add@/x", "add@/x\x00ACTION=add"} {
		if e, ok := parseUevent([]byte(bad)); ok {
			t.Errorf("%q taken as %+v", bad, e)
		}
	}
}

func FuzzParseUevent(f *testing.F) {
	f.Add([]byte("add@/x\x00ACTION=add\x00DEVPATH=/x\x00SEQNUM=1\x00"))
	f.Fuzz(func(t *testing.T, data []byte) { parseUevent(data) })
}

// fakeSysfs is a /sys with devices.
func fakeSysfs(t *testing.T, seq string, modaliases map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	write := func(path, text string) {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("kernel/uevent_seqnum", seq+"\n")
	for path, m := range modaliases {
		write(path+"/modalias", m+"\n")
	}
	return dir
}

func newTestDaemon(t *testing.T, k *fakeKernel, sysfs string, events chan Uevent) *daemon {
	l := logs.New(nil)
	return &daemon{
		sysfs: sysfs, dev: t.TempDir(), log: l.Logger("udevd"), modules: k.Modules,
		listen: func(context.Context) (<-chan Uevent, error) { return events, nil },
	}
}

func TestColdplugThenHotplug(t *testing.T) {
	k := newFakeKernel(t)
	events := make(chan Uevent)
	sysfs := fakeSysfs(t, "7", map[string]string{
		"bus/virtio/devices/virtio0": "virtio:d00000001v00001AF4",
		"bus/virtio/devices/virtio1": "virtio:d00000001v00001AF4",
		"bus/acpi/devices/x":         "acpi:NOBODY:",
	})
	d := newTestDaemon(t, k, sysfs, events)
	ctx, cancel := context.WithCancel(t.Context())
	started := make(chan string, 1)
	ended := make(chan error, 1)
	go func() { ended <- d.run(ctx, func(m string) { started <- m }) }()

	if got, want := <-started, "Loaded 1 modules for 2 devices"; got != want {
		t.Errorf("started with %q, want %q", got, want)
	}
	events <- Uevent{Action: "add", DevPath: "/x", Modalias: "pci:v1bc01sc06", Seq: 8}
	events <- Uevent{Action: "remove", DevPath: "/x", Modalias: "pci:gone", Seq: 9}
	eventually.That(t, 5*time.Second, "the new device's modules to be loaded", func() error {
		k.mu.Lock()
		defer k.mu.Unlock()
		if !slices.Contains(k.order, "b") {
			return fmt.Errorf("loaded: %v", k.order)
		}
		return nil
	})
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Devices that appear after a bus driver is loaded are handled before udevd is up.
func TestSettlesAfterFollowUpDevices(t *testing.T) {
	k := newFakeKernel(t)
	events := make(chan Uevent)
	sysfs := fakeSysfs(t, "1", map[string]string{"bus/pci/devices/0": "pci:bc01"})
	insert := k.insert
	k.insert = func(path, parameters string) error {
		if nameOf(path) == "a" {
			// The kernel has sent an event that isn't read yet.
			if err := os.WriteFile(filepath.Join(sysfs, "kernel/uevent_seqnum"), []byte("2\n"), 0o644); err != nil {
				t.Error(err)
			}
			go func() { events <- Uevent{Action: "add", DevPath: "/v", Modalias: "virtio:d00000001v1", Seq: 2} }()
		}
		return insert(path, parameters)
	}
	d := newTestDaemon(t, k, sysfs, events)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	started := make(chan []string, 1)
	go d.run(ctx, func(string) {
		k.mu.Lock()
		defer k.mu.Unlock()
		started <- slices.Clone(k.order)
	})
	if order := <-started; !slices.Contains(order, "virtio_net") {
		t.Errorf("up before the second device was seen to: %v", order)
	}
}

// A panic while a module is loaded is a failed load, not the end of PID 1.
func TestPanicInAWorkerIsAFailedLoad(t *testing.T) {
	k := newFakeKernel(t)
	k.insert = func(string, string) error { panic("oh") }
	d := newTestDaemon(t, k, fakeSysfs(t, "1", map[string]string{"bus/pci/devices/0": "pci:bc01"}), make(chan Uevent))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	started := make(chan string, 1)
	go d.run(ctx, func(m string) { started <- m })
	if got := <-started; got != "Loaded 0 modules for 1 devices" {
		t.Errorf("started with %q", got)
	}
}

// Modules for processors are loaded after udevd is up.
func TestProcessorsCanWait(t *testing.T) {
	k := newFakeKernel(t)
	k.aliases = parseAliases("alias cpu:type:x86,ven*fam*mod*:feature:*0099* virtio_net\n")
	d := newTestDaemon(t, k, fakeSysfs(t, "1", map[string]string{"bus/cpu/devices/cpu0": "cpu:type:x86,ven0fam6mod1:feature:,0099,"}), make(chan Uevent))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	atStart := make(chan []string, 1)
	go d.run(ctx, func(string) {
		k.mu.Lock()
		defer k.mu.Unlock()
		atStart <- slices.Clone(k.order)
	})
	if order := <-atStart; slices.Contains(order, "virtio_net") {
		t.Errorf("loaded before: %v", order)
	}
	eventually.That(t, 5*time.Second, "the processor's module to be loaded", func() error {
		k.mu.Lock()
		defer k.mu.Unlock()
		if !slices.Contains(k.order, "virtio_net") {
			return fmt.Errorf("loaded: %v", k.order)
		}
		return nil
	})
}

func TestLostEventsMakeItLookAgain(t *testing.T) {
	k := newFakeKernel(t)
	events := make(chan Uevent)
	sysfs := fakeSysfs(t, "1", nil)
	d := newTestDaemon(t, k, sysfs, events)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	started := make(chan string, 1)
	go d.run(ctx, func(m string) { started <- m })
	<-started
	path := filepath.Join(sysfs, "bus/virtio/devices/late")
	if err := errors.Join(os.MkdirAll(path, 0o755), os.WriteFile(path+"/modalias", []byte("virtio:d00000001v1\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	events <- Uevent{Lost: true}
	eventually.That(t, 5*time.Second, "the missed device to be found", func() error {
		k.mu.Lock()
		defer k.mu.Unlock()
		if !slices.Contains(k.order, "virtio_net") {
			return fmt.Errorf("loaded: %v", k.order)
		}
		return nil
	})
}

func TestContainerSkips(t *testing.T) {
	if why := Service(Options{Mode: boot.Container}).Skip(); why == "" {
		t.Error("runs in a container")
	}
	if why := Service(Options{Mode: boot.Machine}).Skip(); why != "" {
		t.Errorf("skipped on a machine: %s", why)
	}
}

// On a real machine modaliasPlaces have every modalias that is below
// /sys/devices.
func TestColdplugMissesNothingHere(t *testing.T) {
	found := modaliases("/sys")
	err := filepath.WalkDir("/sys/devices", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.Name() != "modalias" {
			return nil
		}
		data, err := os.ReadFile(path)
		if m := strings.TrimSpace(string(data)); err == nil && m != "" && !slices.Contains(found, m) {
			t.Errorf("%s (%s) is in none of the places", path, m)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d kinds of devices", len(found))
}

func TestStaticNodesTableIsSound(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range required {
		if r.Why == "" || seen[r.Name] || r.Name != canonical(r.Name) {
			t.Errorf("row %+v", r)
		}
		seen[r.Name] = true
	}
	if len(required) < 10 {
		t.Errorf("%d rows", len(required))
	}
}
