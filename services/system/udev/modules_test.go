package udev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// fakeKernel is a module folder and a kernel that records loaded modules.
type fakeKernel struct {
	*Modules
	mu     sync.Mutex
	order  []string
	refuse map[string]error
	given  map[string]string // parameters, by module
}

const sampleDep = `kernel/lib/libcrc32c.ko:
kernel/crypto/crc32c-intel.ko:
kernel/fs/xfs/xfs.ko: kernel/lib/libcrc32c.ko
kernel/net/virtio/virtio_net.ko: kernel/net/failover.ko kernel/drivers/virtio.ko kernel/drivers/virtio_ring.ko
kernel/net/failover.ko: kernel/drivers/virtio.ko kernel/drivers/virtio_ring.ko
kernel/drivers/virtio.ko: kernel/drivers/virtio_ring.ko
kernel/drivers/virtio_ring.ko:
kernel/a.ko:
kernel/b.ko: kernel/a.ko
`

const sampleSoftdep = `# Soft dependencies
softdep libcrc32c pre: crc32c
softdep xfs pre: not_there post: a
softdep a pre: b
softdep b post: a
`

func newFakeKernel(t *testing.T) *fakeKernel {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"modules.dep":     sampleDep,
		"modules.softdep": sampleSoftdep,
		"modules.builtin": "kernel/fs/ext4/ext4.ko\nkernel/drivers/char/tpm/tpm-tis.ko\n",
		"modules.alias":   "alias fs-xfs xfs\nalias crc32c crc32c_intel\nalias virtio:d00000001v* virtio_net\nalias pci:*bc01* a\nalias pci:*sc06* b\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m, err := OpenModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	k := &fakeKernel{Modules: m, refuse: map[string]error{}, given: map[string]string{}}
	m.insert = func(path, parameters string) error {
		k.mu.Lock()
		defer k.mu.Unlock()
		name := nameOf(path)
		k.given[name] = parameters
		if err := k.refuse[name]; err != nil {
			return err
		}
		if slices.Contains(k.order, name) {
			t.Errorf("%s loaded twice", name)
		}
		for _, need := range m.of(name).needs {
			if !slices.Contains(k.order, need) {
				t.Errorf("%s loaded before %s", name, need)
			}
		}
		k.order = append(k.order, name)
		return nil
	}
	return k
}

func TestLoadBringsDependenciesInOrder(t *testing.T) {
	k := newFakeKernel(t)
	if err := k.Load("virtio-net"); err != nil {
		t.Fatal(err)
	}
	if err := k.Load("virtio_net"); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"virtio_ring", "virtio", "failover", "virtio_net"}, k.order); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestLoadSoftDependencies(t *testing.T) {
	k := newFakeKernel(t)
	if err := k.Load("xfs"); err != nil {
		t.Fatal(err)
	}
	// crc32c is an alias; there is no module not_there; a and b depend on each other.
	if d := cmp.Diff([]string{"crc32c_intel", "libcrc32c", "xfs", "a", "b"}, k.order); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestLoadBuiltinAndUnknown(t *testing.T) {
	k := newFakeKernel(t)
	for _, name := range []string{"ext4", "tpm_tis", "tpm-tis"} {
		if err := k.Load(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := k.Load("nosuch"); !errors.Is(err, ErrNoModule) || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("got %v", err)
	}
}

func TestFailedLoadIsTriedAgain(t *testing.T) {
	k := newFakeKernel(t)
	k.refuse["virtio"] = unix.EIO
	err := k.Load("virtio_net")
	if !errors.Is(err, unix.EIO) || err.Error() != "load module virtio_net: load module virtio: input/output error" {
		t.Errorf("got %v", err)
	}
	delete(k.refuse, "virtio")
	if err := k.Load("virtio_net"); err != nil {
		t.Error(err)
	}
}

func TestLoadForReportsAllThatFail(t *testing.T) {
	k := newFakeKernel(t)
	k.refuse["a"] = unix.EIO
	loaded, err := k.LoadFor("pci:v1bc01sc06")
	if loaded != nil || !errors.Is(err, unix.EIO) || !strings.HasPrefix(err.Error(), "device pci:v1bc01sc06: ") {
		t.Errorf("got %v, %v", loaded, err)
	}
	k.refuse["a"] = unix.ENODEV
	if loaded, err := k.LoadFor("pci:v1bc01sc06"); loaded != nil || err != nil {
		t.Errorf("a device that isn't there after all: %v, %v", loaded, err)
	}
	delete(k.refuse, "a")
	if loaded, err := k.LoadFor("pci:v1bc01sc06"); !cmp.Equal(loaded, []string{"a", "b"}) || err != nil {
		t.Errorf("got %v, %v", loaded, err)
	}
}

func TestModprobe(t *testing.T) {
	k := newFakeKernel(t)
	for _, name := range []string{"fs-xfs", "failover", "ext4"} {
		if err := k.modprobe(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := k.modprobe("net-pf-99"); !errors.Is(err, ErrNoModule) {
		t.Errorf("got %v", err)
	}
	if !slices.Contains(k.order, "xfs") || !slices.Contains(k.order, "failover") {
		t.Errorf("loaded %v", k.order)
	}
}

func TestConcurrentLoadsShareTheWork(t *testing.T) {
	k := newFakeKernel(t)
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			name := []string{"xfs", "virtio_net", "a", "b"}[i%4]
			if err := k.Load(name); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait() // ends: circles of soft dependencies don't deadlock
}

func TestOpenModulesWithoutFolder(t *testing.T) {
	if _, err := OpenModules(t.TempDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestParseStaticNode(t *testing.T) {
	for line, want := range map[string]staticNode{
		"fuse fuse c10:229":             {"fuse", unix.S_IFCHR | 0o666, 10, 229},
		"tun net/tun c10:200":           {"net/tun", unix.S_IFCHR | 0o666, 10, 200},
		"dm_mod mapper/control c10:236": {"mapper/control", unix.S_IFCHR | 0o600, 10, 236},
		"x some b7:1":                   {"some", unix.S_IFBLK | 0o600, 7, 1},
	} {
		got, ok := parseStaticNode(line + "\n")
		if !ok || got != want {
			t.Errorf("%s: %+v, %v", line, got, ok)
		}
	}
	for _, line := range []string{"", "# comment line here", "a b", "a ../b c1:2", "a /b c1:2", "a b x1:2", "a b c1", "a b c1:x"} {
		if got, ok := parseStaticNode(line); ok {
			t.Errorf("%q: %+v", line, got)
		}
	}
}

func Example_canonical() {
	fmt.Println(nameOf("kernel/net/8021q/8021q.ko"), nameOf("kernel/drivers/nvme/host/nvme-core.ko.xz"))
	// Output: 8021q nvme_core
}
