//go:build kernel

package disks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/source"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/volume"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
	"github.com/garboard-os/garboard/tools/testing/uml"
	"golang.org/x/sys/unix"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// loop is a disk made of a sparse file.
type loop struct {
	*loopdisk.Disk
	t *testing.T
}

func newLoop(t *testing.T, size int64) *loop {
	t.Helper()
	return &loop{loopdisk.New(t, size), t}
}

// device is the disk as the service sees it, with its content.
func (l *loop) device() disk.Disk {
	l.t.Helper()
	d, _ := disk.At(l.Path) // it may have no partition table
	d, err := d.Inspect()
	if err != nil {
		l.t.Fatal(err)
	}
	return d
}

type syncBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// machineUnderTest is the service with its inputs.
type machineUnderTest struct {
	t       *testing.T
	store   *resource.Store
	console *syncBuffer
	dir     string
	disks   *Disks
	applier *configuration.Applier
	cut     string // the step before which the power is cut
	// hostname distinguishes its configuration from others.
	hostname string
	persist  []string // machine.kubelet.persist
	// encryption is machine.systemDiskEncryption.
	encryption config.SystemDiskEncryption
	servers    []netip.Addr // machine.network.nameservers
}

// secrets are made once, because that takes time.
var secrets = sync.OnceValue(func() *config.Secrets {
	s, err := config.NewSecrets(time.Now())
	if err != nil {
		panic(err)
	}
	return s
})

var errPowerCut = errors.New("power cut")

// bootMachine is a machine with only these disks.
func bootMachine(t *testing.T, disks ...*loop) *machineUnderTest {
	t.Helper()
	uml.Booted(t)
	m := &machineUnderTest{t: t, store: resource.NewStore(), console: &syncBuffer{}, dir: t.TempDir()}
	for _, dir := range []string{"state", "efi", "var", "plugins", "etc/cni/net.d", "etc/kubernetes/volumeplugins"} {
		if err := os.MkdirAll(filepath.Join(m.dir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	l := logs.New(m.console)
	m.applier = configuration.NewApplier(configuration.ApplierOptions{Store: m.store, Log: l.Logger(configuration.ID), StateDir: filepath.Join(m.dir, "state")})
	m.disks = New(Options{
		Mode: boot.Machine, Store: m.store, Processes: process.New(), Logs: l, StateReady: m.applier.StateReady,
		dirs:   volume.Dirs{State: filepath.Join(m.dir, "state"), Var: filepath.Join(m.dir, "var"), Etc: filepath.Join(m.dir, "etc")},
		idFile: filepath.Join(m.dir, "machine-id"), efiDir: filepath.Join(m.dir, "efi"),
		Plugins: filepath.Join(m.dir, "plugins"), uuidFile: filepath.Join(m.dir, "uuid"),
		derivation: []string{"--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"},
	})
	m.write("uuid", "9c3a7e21-5d48-4b0f-8f62-17e4d9c05ab3\n")
	m.disks.Keeper.Disks.Is = func(name string) bool {
		return slices.ContainsFunc(disks, func(l *loop) bool { return l.Name == name })
	}
	m.disks.Keeper.Before = func(step string) error {
		if step == m.cut {
			return fmt.Errorf("before %s: %w", step, errPowerCut)
		}
		return nil
	}
	m.disks.Keeper.Disks.Began = time.Now().Add(-disk.LateDisks)
	t.Cleanup(m.disks.close)
	return m
}

// up runs the service until the test ends, or returns the reason why it can't start.
func (m *machineUnderTest) up(install config.Install) error {
	m.t.Helper()
	c, err := config.Generate(config.Options{ClusterName: "test", Endpoint: "https://10.5.0.2:6443", Hostname: m.hostname, Secrets: secrets()})
	if err != nil {
		m.t.Fatal(err)
	}
	c.Machine.Install, c.Machine.Kubelet.Persist = install, m.persist
	c.Machine.SystemDiskEncryption, c.Machine.Network.Nameservers = m.encryption, m.servers
	text, err := c.Encode()
	if err != nil {
		m.t.Fatal(err)
	}
	medium := source.Source{Name: "medium", Read: func(context.Context) ([]byte, error) { return text, nil }}
	started := make(chan struct{})
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	g, err := dag.New(dag.Options{},
		configuration.Service(configuration.Options{Store: m.store, Applier: m.applier, Sources: []source.Source{medium}}),
		dag.Service{ID: ID, DependsOn: []string{"machined"}, Restart: dag.RestartNever, Run: func(ctx context.Context, h *dag.Handle) error {
			err := m.disks.run(ctx, h)
			ended <- err
			return err
		}})
	if err != nil {
		m.t.Fatal(err)
	}
	go func() { g.Up(ID).Wait(ctx); close(started) }()
	var wg sync.WaitGroup
	wg.Go(func() { g.Run(ctx) })
	m.t.Cleanup(func() { cancel(); wg.Wait() })
	select {
	case <-started:
		return nil
	case err := <-ended:
		return err
	case <-time.After(eventually.Scale(60 * time.Second)):
		s, _ := g.Status(ID)
		m.t.Fatalf("disks is neither up nor failed: %+v", s)
		return nil
	}
}

func (m *machineUnderTest) mustUp(install config.Install) {
	m.t.Helper()
	if err := m.up(install); err != nil {
		m.t.Fatal(err)
	}
}

// mountState reports whether STATE is mounted.
func (m *machineUnderTest) mountState() (found bool, err error) {
	m.t.Helper()
	state, err := m.disks.MountState(m.t.Context())
	return state == configuration.StateMounted, err
}

// off stops everything, as a shutdown does.
func (m *machineUnderTest) off() { m.disks.close() }

func (m *machineUnderTest) write(file, content string) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(m.dir, file), []byte(content), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machineUnderTest) read(file string) string {
	m.t.Helper()
	data, err := os.ReadFile(filepath.Join(m.dir, file))
	if err != nil {
		m.t.Fatal(err)
	}
	return string(data)
}

func TestEmptyDiskIsTakenAndFoundAgain(t *testing.T) {
	l := newLoop(t, 16*gib)
	m := bootMachine(t, l)
	if found, err := m.mountState(); found || err != nil {
		t.Fatalf("STATE on an empty disk: %v, %v", found, err)
	}
	m.mustUp(config.Install{Disk: l.Path})

	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Join(m.dir, "var"), &st); err != nil || st.Type != unix.XFS_SUPER_MAGIC {
		t.Errorf("EPHEMERAL is of type %x (%v), want xfs", st.Type, err)
	}
	if size := int64(st.Blocks) * st.Bsize; size < 13*gib {
		t.Errorf("EPHEMERAL has only %s of a disk of 16 GiB", disk.SizeText(size))
	}
	if fi, err := os.Stat(filepath.Join(m.dir, "var/lib/etcd")); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("etcd's directory: %v, %v", fi, err)
	}
	if fi, err := os.Stat(filepath.Join(m.dir, "state/config.yaml")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the configuration on STATE (S-021): %v, %v", fi, err)
	}
	m.write("state/mine", "kept")
	m.write("var/mine", "kept too")
	m.write("var/opt/cni/bin/mine", "until the next boot")
	m.write("var/opt/cni/bin/bridge", "of a pod")
	m.off()
	if _, err := os.Stat(filepath.Join(m.dir, "plugins/mine")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a plugin got into the image: %v", err)
	}

	again := bootMachine(t, l)
	again.write("plugins/bridge", "of the image")
	found, err := again.mountState()
	if !found || err != nil {
		t.Fatalf("STATE wasn't found again: %v", err)
	}
	// wipe is for foreign disks: a boot never erases one of ours.
	again.mustUp(config.Install{Disk: "/dev/named-differently-today", Wipe: true})
	if got := again.read("state/mine") + ", " + again.read("var/mine") + ", " + again.read("var/opt/cni/bin/bridge"); got != "kept, kept too, of the image" {
		t.Errorf("after the second boot: %q", got)
	}
	if _, err := os.Stat(filepath.Join(again.dir, "var/opt/cni/bin/mine")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a plugin of a pod is there after the next boot: %v", err)
	}
}

// What pods leave for the next start is there again if the configuration has its name, and is gone for good if it
// hasn't.
func TestWhatPodsLeaveIsKept(t *testing.T) {
	l := newLoop(t, 16*gib)
	places := []string{"var/opt/cni/bin/mine", "etc/cni/net.d/mine", "etc/kubernetes/volumeplugins/mine"}
	for i, tc := range []struct {
		persist []string
		keeps   string // of what the boot before has left
	}{
		{[]string{"cni", "volumePlugins"}, ""},
		{[]string{"cni", "volumePlugins"}, strings.Join(places, " ")},
		{[]string{"cni"}, strings.Join(places[:2], " ")},
		{[]string{"cni", "volumePlugins"}, strings.Join(places[:2], " ")},
		{nil, ""},
		{[]string{"cni"}, places[0]}, // plugins are on the disk until the boot that removes them
	} {
		m := bootMachine(t, l)
		m.persist = tc.persist
		if found, err := m.mountState(); found != (i > 0) || err != nil {
			t.Fatalf("boot %d: STATE was found: %t, %v", i, found, err)
		}
		// it would replace this one
		if err := os.Remove(filepath.Join(m.dir, "state/config.yaml")); i > 0 && err != nil {
			t.Fatal(err)
		}
		m.mustUp(config.Install{Disk: l.Path})
		var keeps []string
		for _, place := range places {
			if _, err := os.Stat(filepath.Join(m.dir, place)); err == nil {
				keeps = append(keeps, place)
			}
			m.write(place, "of a pod")
		}
		if got := strings.Join(keeps, " "); got != tc.keeps {
			t.Errorf("boot %d: kept are %q, not %q", i, got, tc.keeps)
		}
		m.off()
	}
}

// The selected disk is taken, however the disks are named.
func TestDiskIsSelected(t *testing.T) {
	small, large := newLoop(t, 4*gib), newLoop(t, 6*gib)
	m := bootMachine(t, small, large)
	plan, err := m.disks.Place(config.Install{Disk: small.Path})
	if err != nil || plan != "the system comes onto "+small.Path+" (4 GiB): EFI 272 MiB, BIOS 1 MiB, META 1 MiB, STATE 320 MiB, EPHEMERAL 3.4 GiB; it is empty" {
		t.Errorf("%q, %v", plan, err)
	}
	if _, err := m.disks.Place(config.Install{Disk: "/dev/nothing"}); err == nil || !strings.Contains(err.Error(), "no disk /dev/nothing. The disks here:\nDEVICE") {
		t.Errorf("%v", err)
	}
	m.mustUp(config.Install{DiskSelector: config.DiskSelector{Size: config.DiskSize{Comparison: ">", Bytes: 5 * gib}}})
	if m.disks.System().Path != large.Path {
		t.Errorf("the system is on %s, and not on %s", m.disks.System().Path, large.Path)
	}
	link := filepath.Join(t.TempDir(), "by-id")
	if err := os.Symlink(small.Path, link); err != nil {
		t.Fatal(err)
	}
	if dev, found, _, err := m.disks.chosen(config.Install{Disk: link}); dev.Path != small.Path || !found || err != nil {
		t.Errorf("the disk of a link: %s, %v, %v", dev.Path, found, err)
	}
	_, found, why, err := m.disks.chosen(config.Install{DiskSelector: config.DiskSelector{Serial: "none", Model: "none"}})
	if found || err != nil {
		t.Errorf("found %v, %v", found, err)
	}
	table := m.disks.Keeper.Disks.Text(why)
	if n := strings.Count(table, `; not selected: its model is "", its serial is ""`); n != 2 {
		t.Errorf("the disks:\n%s", table)
	}
}

// Who names the serial number of a disk wants that disk, whatever it holds. A pattern may fit another one.
func TestDiskWithDataIsNamedBySerial(t *testing.T) {
	l := newLoop(t, 4*gib)
	loopdisk.Run(t, "mkfs.xfs", "-q", "-L", "photos", l.Path)
	selected := config.Install{DiskSelector: config.DiskSelector{Serial: "serial of loop*"}}
	refused(t, bootMachine(t, l).numbered().up(selected), `holds xfs file system "photos", and isn't touched`)
	selected.DiskSelector.Serial = "serial of " + l.Name
	m := bootMachine(t, l).numbered()
	m.mustUp(selected)
	if text := m.console.String(); !strings.Contains(text, "erasing "+l.Path+`, which held xfs file system "photos": machine.install.diskSelector has its serial number`) {
		t.Errorf("console: %s", text)
	}
}

// After a power cut before any step, the next boot finishes the disk.
func TestPowerCutAtEachStep(t *testing.T) {
	for _, step := range []string{"journal", "erase", "table", "partitions", "format STATE", "format EPHEMERAL", "done"} {
		t.Run(step, func(t *testing.T) {
			l := newLoop(t, 4*gib)
			m := bootMachine(t, l)
			m.cut = step
			if err := m.up(config.Install{Disk: l.Path}); !errors.Is(err, errPowerCut) {
				t.Fatalf("the power should have gone before %s: %v", step, err)
			}
			m.off()

			again := bootMachine(t, l)
			if found, err := again.mountState(); found || err != nil {
				t.Fatalf("STATE of a half-made disk: found %v, %v", found, err)
			}
			again.mustUp(config.Install{Disk: l.Path})
		})
	}
}

// A disk with any content isn't changed, and the error says what to do.
func TestForeignDiskIsRefused(t *testing.T) {
	cases := []struct {
		name string
		put  func(t *testing.T, l *loop)
		want string // the content
	}{
		{"ext4", func(t *testing.T, l *loop) { loopdisk.Run(t, "mkfs.ext4", "-q", "-L", "photos", l.Path) }, `ext4 file system "photos"`},
		{"xfs", func(t *testing.T, l *loop) { loopdisk.Run(t, "mkfs.xfs", "-q", "-L", "data", l.Path) }, `xfs file system "data"`},
		{"partitions", putPartitions, `partitions "ESP", "root" (xfs "root")`},
		{"same labels, other types", putLookalike, `partitions "EFI", "BIOS", "META", "STATE", "EPHEMERAL"`},
		{"data", func(t *testing.T, l *loop) { l.WriteAt(777, "?") }, "unknown data"},
		{"data at the end", func(t *testing.T, l *loop) { l.WriteAt(4*gib-100, "?") }, "unknown data"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			l := newLoop(t, 4*gib)
			c.put(t, l)
			before := l.Edges()
			m := bootMachine(t, l)
			err := m.up(config.Install{Disk: l.Path})
			if err == nil {
				t.Fatal("the disk was taken")
			}
			want := `disk /dev/loopN holds ` + c.want + `, and isn't touched. Name another disk in machine.install.disk, or set machine.install.wipe: true to erase this one. The disks here:
DEVICE      SIZE   MODEL  SERIAL  HOLDS
/dev/loopN  4 GiB  -      -       ` + c.want
			if got := regexp.MustCompile(`loop\d+ *`).ReplaceAllString(err.Error(), "loopN "); got != regexp.MustCompile(`loopN *`).ReplaceAllString(want, "loopN ") {
				t.Errorf("the error is\n%s\nwant\n%s", got, want)
			}
			if !bytes.Equal(before, l.Edges()) {
				t.Error("the disk was written to")
			}

			if _, planned := m.disks.Place(config.Install{Disk: l.Path}); planned == nil || planned.Error() != err.Error() {
				t.Errorf("the plan says %v", planned)
			}
			if plan, err := m.disks.Place(config.Install{Disk: l.Path, Wipe: true}); err != nil || !strings.HasSuffix(plan, "; all that is on it is lost: "+c.want) {
				t.Errorf("the plan with wipe: true: %q, %v", plan, err)
			}

			// With wipe: true it is used, unless there is nothing to install.
			sick := bootMachine(t, l)
			sick.disks.o.Sound = func(context.Context) error { return errors.New("the medium is damaged") }
			if err := sick.up(config.Install{Disk: l.Path, Wipe: true}); err == nil || !strings.Contains(err.Error(), "isn't erased: the medium is damaged") || !bytes.Equal(before, l.Edges()) {
				t.Errorf("the disk is erased for a medium that is damaged: %v", err)
			}
			wiped := bootMachine(t, l)
			wiped.mustUp(config.Install{Disk: l.Path, Wipe: true})
			wiped.write("var/mine", "kept")
		})
	}
}

// The list of disks for a user who has to choose one.
func TestListOfDisks(t *testing.T) {
	l, other := newLoop(t, 4*gib), newLoop(t, 1*gib)
	m := bootMachine(t, l, other)
	m.mustUp(config.Install{Disk: l.Path})
	if system, err := m.disks.SystemDisk(); err != nil || !strings.HasPrefix(system.Layout, "EFI 272 MiB, BIOS 1 MiB, META 1 MiB, STATE 320 MiB, EPHEMERAL 3.4 GiB") {
		t.Errorf("the layout is %q, %v", system.Layout, err)
	}
	disks, err := m.disks.List()
	if err != nil || len(disks) != 2 {
		t.Fatalf("%+v, %v", disks, err)
	}
	for _, d := range disks {
		if system := d.Path == l.Path; d.System != system || d.Size != map[bool]int64{true: 4 * gib, false: gib}[system] || d.Holds != map[bool]string{true: "Garboard", false: "nothing"}[system] {
			t.Errorf("%+v", d)
		}
	}
}
