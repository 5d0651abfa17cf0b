//go:build kernel

package volumes

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/services/system/luks"
	"github.com/garboard-os/garboard/services/system/media"
	"github.com/garboard-os/garboard/services/system/volume"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
	"github.com/garboard-os/garboard/tools/testing/uml"
	"golang.org/x/sys/unix"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

func TestMain(m *testing.M) { uml.Main(m) }

// dataDisk is an entry of machine.disks.
func dataDisk(device string, partitions ...config.DataPartition) config.DataDisk {
	return config.DataDisk{Name: "data", Device: device, Partitions: partitions}
}

func partitionOf(name string, size config.ByteSize, kind config.FileSystem) config.DataPartition {
	return config.DataPartition{Mountpoint: "/var/mnt/" + name, Size: size, FileSystem: kind}
}

// node is one whose system disk is mounted.
type node struct {
	t       *testing.T
	dir     string // STATE stays, and the other directories are those of a boot
	cut     string // the step before which the power is cut
	console bytes.Buffer
	volumes *Volumes
}

var errPowerCut = errors.New("power cut")

// withData is a boot of a node with these disks for data.
func withData(t *testing.T, state string, disks ...*loopdisk.Disk) *node {
	t.Helper()
	uml.Booted(t)
	m := &node{t: t, dir: t.TempDir()}
	all := disk.NewInventory()
	all.Began = all.Began.Add(-disk.LateDisks)
	all.Is = func(name string) bool {
		return slices.ContainsFunc(disks, func(l *loopdisk.Disk) bool { return l.Name == name })
	}
	keeper := &volume.Keeper{
		Disks: all, Dirs: volume.Dirs{State: state, Var: filepath.Join(m.dir, "var")},
		Processes: process.New(), Log: slog.New(slog.NewTextHandler(&m.console, nil)),
		Before: func(step string) error {
			if step == m.cut {
				return errPowerCut
			}
			return nil
		},
	}
	system := &disk.Disk{Identity: disk.Identity{Path: "/dev/system"}}
	m.volumes = &Volumes{Keeper: keeper, System: noSystem, KeysOf: m.keysOf, derivation: []string{"--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"}, Media: media.New(media.Finder{Disks: all, System: func() *disk.Disk { return system }})}
	t.Cleanup(m.off)
	return m
}

// keysOf are the keys of a machine with a UUID of its own.
func (m *node) keysOf(configured []config.EncryptionKey, label string) (keys []luks.Key) {
	for _, k := range configured {
		key := luks.Key{Slot: *k.Slot, Kind: "nodeID"}
		if k.Static != nil {
			key.Kind, key.Passphrase = "static", []byte(k.Static.Passphrase)
		} else {
			key.Passphrase, key.Err = luks.NodePassphrase(filepath.Join(m.dir, "uuid"), label)
		}
		keys = append(keys, key)
	}
	return keys
}

// numbered gives the disks serial numbers.
func (m *node) numbered() *node {
	m.volumes.Keeper.Disks.Serial = func(name string) string { return "serial of " + name }
	return m
}

func (m *node) off() { m.volumes.Keeper.Close() }

func (m *node) write(file, content string) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(m.dir, file), []byte(content), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

func (m *node) read(file string) string {
	m.t.Helper()
	data, err := os.ReadFile(filepath.Join(m.dir, file))
	if err != nil {
		m.t.Fatal(err)
	}
	return string(data)
}

func refused(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("the disk was taken")
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error is\n%s\nwant in it: %s", err, part)
		}
	}
}

func (m *node) mustMount(disk config.DataDisk) {
	m.t.Helper()
	if _, _, err := m.volumes.mount(m.t.Context(), disk); err != nil {
		m.t.Fatal(err)
	}
}

// statfs is the type of a file system, and its size in bytes.
func (m *node) statfs(dir string) (kind, size int64) {
	m.t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Join(m.dir, dir), &st); err != nil {
		m.t.Fatal(err)
	}
	return st.Type, int64(st.Blocks) * st.Bsize
}

// The partitions are made, found again under another name of the disk, and the last one grows with the disk. All data
// is kept.
func TestDataDisk(t *testing.T) {
	for last, magic := range map[config.FileSystem]int64{config.XFS: unix.XFS_SUPER_MAGIC, config.Ext4: unix.EXT4_SUPER_MAGIC} {
		t.Run(string(last), func(t *testing.T) {
			system, data := t.TempDir(), loopdisk.New(t, 2*gib)
			first, rest := partitionOf("first", 400*mib, config.Ext4), partitionOf("rest", 0, last)
			m := withData(t, system, data)
			m.mustMount(dataDisk(data.Path, first, rest))
			m.mustMount(dataDisk(data.Path, first, rest)) // nothing to do
			first.FileSystem = config.XFS                 // what is there stays
			if kind, _ := m.statfs("var/mnt/first"); kind != unix.EXT4_SUPER_MAGIC {
				t.Errorf("the first one is of type %x", kind)
			}
			kind, was := m.statfs("var/mnt/rest")
			if kind != magic || was < gib {
				t.Errorf("the rest has %s of type %x", disk.SizeText(was), kind)
			}
			m.write("var/mnt/first/mine", "kept")
			m.write("var/mnt/rest/mine", "kept, too")
			m.off()
			data.Enlarge(4 * gib)

			m = withData(t, system, data)
			m.mustMount(dataDisk("/dev/named-differently-today", first, rest))
			if got := m.read("var/mnt/first/mine") + ", " + m.read("var/mnt/rest/mine"); got != "kept, kept, too" {
				t.Errorf("after the second boot: %q", got)
			}
			if _, size := m.statfs("var/mnt/rest"); size-was < 2*gib*9/10 {
				t.Errorf("the rest has grown by %s of 2 GiB", disk.SizeText(size-was))
			}
		})
	}
}

// A partition is added to a disk whose other one is in use, wherever the power was cut.
func TestPartitionIsAdded(t *testing.T) {
	for _, cut := range []string{"", "journal", "erase", "table", "partitions", "format more", "done"} {
		t.Run("cut before "+cut, func(t *testing.T) {
			system, data := t.TempDir(), loopdisk.New(t, 2*gib)
			first, more := partitionOf("first", 400*mib, config.XFS), partitionOf("more", 0, config.Ext4)
			m := withData(t, system, data)
			m.mustMount(dataDisk(data.Path, first))
			m.write("var/mnt/first/mine", "kept")
			data.WriteAt(mib+400*mib+100, "what was there before")
			if m.cut = cut; cut != "" {
				if _, _, err := m.volumes.mount(t.Context(), dataDisk(data.Path, first, more)); !errors.Is(err, errPowerCut) {
					t.Fatalf("the power should have gone: %v", err)
				}
				m.off()
				m = withData(t, system, data)
			}
			m.mustMount(dataDisk(data.Path, first, more))
			if kind, size := m.statfs("var/mnt/more"); kind != unix.EXT4_SUPER_MAGIC || size < gib {
				t.Errorf("the new one has %s of type %x", disk.SizeText(size), kind)
			}
			if got := m.read("var/mnt/first/mine"); got != "kept" {
				t.Errorf("the first one has %q", got)
			}
		})
	}
}

// Half a file system of the first of two new partitions is made anew, before the second one is added.
func TestPartitionsAreAddedAfterAPowerCut(t *testing.T) {
	system, data := t.TempDir(), loopdisk.New(t, 2*gib)
	first, more, last := partitionOf("first", 400*mib, config.XFS), partitionOf("more", 400*mib, config.Ext4), partitionOf("last", 0, config.XFS)
	m := withData(t, system, data)
	m.mustMount(dataDisk(data.Path, first))
	m.write("var/mnt/first/mine", "kept")
	m.cut = "format more"
	if _, _, err := m.volumes.mount(t.Context(), dataDisk(data.Path, first, more, last)); !errors.Is(err, errPowerCut) {
		t.Fatalf("the power should have gone: %v", err)
	}
	m.off()
	data.WriteAt(mib+400*mib+100, "half a file system")
	m = withData(t, system, data)
	m.mustMount(dataDisk(data.Path, first, more, last))
	for _, name := range []string{"more", "last"} {
		m.write("var/mnt/"+name+"/mine", "kept")
	}
	if got := m.read("var/mnt/first/mine"); got != "kept" {
		t.Errorf("the first one has %q", got)
	}
}

// After a power cut before any step, the next boot finishes the disk.
func TestPowerCutAtEachStepOfADataDisk(t *testing.T) {
	for _, cut := range []string{"journal", "erase", "table", "partitions", "format first", "format rest", "done"} {
		t.Run(cut, func(t *testing.T) {
			system, data := t.TempDir(), loopdisk.New(t, 2*gib)
			disk := dataDisk(data.Path, partitionOf("first", 400*mib, config.XFS), partitionOf("rest", 0, config.Ext4))
			m := withData(t, system, data)
			m.cut = cut
			if _, _, err := m.volumes.mount(t.Context(), disk); !errors.Is(err, errPowerCut) {
				t.Fatalf("the power should have gone: %v", err)
			}
			m.off()
			m = withData(t, system, data)
			m.mustMount(disk)
			m.write("var/mnt/first/mine", "kept")
			m.write("var/mnt/rest/mine", "kept")
		})
	}
}

// What is on a disk isn't touched, and the error says what to do.
func TestDataDiskIsRefused(t *testing.T) {
	system := t.TempDir()
	for name, tt := range map[string]struct {
		size int64
		put  func(t *testing.T, l *loopdisk.Disk)
		wipe bool
		want string
	}{
		"foreign":          {gib, func(t *testing.T, l *loopdisk.Disk) { loopdisk.Run(t, "mkfs.xfs", "-q", "-L", "photos", l.Path) }, false, `holds xfs file system "photos", and isn't touched. Name another disk in machine.disks[data].device, or set machine.disks[data].wipe: true to erase this one`},
		"data of others":   {gib, func(t *testing.T, l *loopdisk.Disk) { others(t, system, l) }, true, `has the data of other machine.disks (partitions "others" (xfs "others")), and isn't touched. Name another disk in machine.disks[data].device, or erase this one first: gbctl -n ADDRESS reset --user-disks-to-wipe`},
		"another system":   {4 * gib, putSystem, true, "holds Garboard. Name another disk in machine.disks[data].device"},
		"a disk too small": {gib / 2, func(*testing.T, *loopdisk.Disk) {}, false, "has no room for rest: 110 MiB of at least 320 MiB. Correct machine.disks[data].partitions"},
	} {
		t.Run(name, func(t *testing.T) {
			data := loopdisk.New(t, tt.size)
			tt.put(t, data)
			before := data.Edges()
			m := withData(t, system, data)
			disk := dataDisk(data.Path, partitionOf("first", 400*mib, config.XFS), partitionOf("rest", 0, config.XFS))
			disk.Wipe = tt.wipe
			_, _, err := m.volumes.mount(t.Context(), disk)
			refused(t, err, "disk "+data.Path+" "+tt.want+". The disks here:\nDEVICE")
			if string(before) != string(data.Edges()) {
				t.Error("the disk was written to")
			}
		})
	}
}

// others puts another entry of machine.disks onto a disk.
func others(t *testing.T, system string, data *loopdisk.Disk) {
	t.Helper()
	m := withData(t, system, data)
	disk := dataDisk(data.Path, partitionOf("others", 0, config.XFS))
	disk.Name = "others"
	m.mustMount(disk)
	m.off()
}

// putSystem makes the partitions of a system.
func putSystem(t *testing.T, l *loopdisk.Disk) {
	t.Helper()
	d, _ := disk.At(l.Path) // it has no partition table yet
	d.Table = d.NewTable(boot.Places(d.Size))
	if err := d.ChangeUnused(d.WriteTable); err != nil {
		t.Fatal(err)
	}
}

// An empty disk isn't taken while the one with the data may still appear.
func TestDataDiskComesLate(t *testing.T) {
	data := loopdisk.New(t, gib)
	m := withData(t, t.TempDir(), data)
	m.volumes.Keeper.Disks.Began = time.Now()
	_, _, err := m.volumes.mount(t.Context(), dataDisk(data.Path, partitionOf("data", 0, config.XFS)))
	refused(t, err, "waits for disks that come late")
}

// What machines are started from isn't selected.
func TestMediumIsNoDataDisk(t *testing.T) {
	medium := loopdisk.New(t, gib)
	medium.WriteAt(32769, "CD001")
	before := medium.Edges()
	disk := dataDisk("", partitionOf("data", 0, config.XFS))
	disk.DiskSelector.Size, disk.Wipe = config.DiskSize{Comparison: "==", Bytes: gib}, true
	_, _, err := withData(t, t.TempDir(), medium).volumes.mount(t.Context(), disk)
	refused(t, err, "no disk fits data of machine.disks", "; not selected: is an installation medium")
	if string(before) != string(medium.Edges()) {
		t.Error("the medium was written to")
	}
}

// A selector takes an empty disk, and none with other data; with two disks that have the partition, neither is mounted.
func TestDataDiskIsSelected(t *testing.T) {
	system, foreign, first, second := t.TempDir(), loopdisk.New(t, gib), loopdisk.New(t, gib), loopdisk.New(t, gib)
	loopdisk.Run(t, "mkfs.xfs", "-q", "-L", "photos", foreign.Path)
	disk := dataDisk("", partitionOf("data", 0, config.XFS))
	disk.DiskSelector.Size = config.DiskSize{Comparison: "==", Bytes: gib}
	m := withData(t, system, foreign)
	_, _, err := m.volumes.mount(t.Context(), disk)
	refused(t, err, `holds xfs file system "photos", and isn't touched`)
	m.off()

	m = withData(t, system, foreign, first)
	m.mustMount(disk)
	m.write("var/mnt/data/mine", "kept")
	m.off()
	copyDisk(t, first, second)
	m = withData(t, system, first, second)
	_, _, err = m.volumes.mount(t.Context(), disk)
	refused(t, err, first.Path, second.Path, "both have partitions of data")
	m.off()
	m = withData(t, system, second)
	m.mustMount(disk)
	if got := m.read("var/mnt/data/mine"); got != "kept" {
		t.Errorf("the copy has %q", got)
	}
	m.off()
	disk.Name, disk.Device = "more", "/dev/nothing"
	_, _, err = withData(t, system, foreign).volumes.mount(t.Context(), disk)
	refused(t, err, "no disk fits more of machine.disks. Plug it in, or correct device or diskSelector")
}

// While the disk of an entry is missing, an empty one isn't used in its place. The disk itself is, after it was erased.
func TestMissingDataDisk(t *testing.T) {
	system, data, spare := t.TempDir(), loopdisk.New(t, gib), loopdisk.New(t, gib)
	disk := dataDisk("", partitionOf("data", 0, config.XFS))
	disk.DiskSelector.Size = config.DiskSize{Comparison: "==", Bytes: gib}
	m := withData(t, system, data)
	m.mustMount(disk)
	m.write("var/mnt/data/mine", "kept")
	m.off()

	m = withData(t, system, spare)
	_, _, err := m.volumes.mount(t.Context(), disk)
	refused(t, err, "the disk of data (1 GiB) is missing. Plug it in, or give the entry of machine.disks another name")
	m.off()
	m = withData(t, system, spare, data)
	m.mustMount(disk)
	if got := m.read("var/mnt/data/mine"); got != "kept" {
		t.Errorf("the file has %q", got)
	}
	m.off()

	disk.Name = "again"
	m = withData(t, system, spare)
	m.numbered()
	m.mustMount(disk)
	m.off()
	spare.WriteAt(0, strings.Repeat("\x00", 2*mib))
	spare.WriteAt(gib-mib, strings.Repeat("\x00", mib))
	m = withData(t, system, spare)
	m.numbered()
	m.mustMount(disk)
}

func copyDisk(t *testing.T, from, to *loopdisk.Disk) {
	t.Helper()
	from.Control(unix.BLKFLSBUF) // what was read of the disk before its partitions were written to
	in, err := os.Open(from.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to.Path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Sync(), out.Close()); err != nil {
		t.Fatal(err)
	}
}

// A pod may write a partition of any name to a raw disk of its own. Who has the record is the disk.
func TestPodsDiskWithTheNameOfAPartition(t *testing.T) {
	system, data, pods := t.TempDir(), loopdisk.New(t, gib), loopdisk.New(t, gib)
	disk := dataDisk("", partitionOf("data", 0, config.XFS))
	disk.DiskSelector.Size = config.DiskSize{Comparison: "==", Bytes: gib}
	boots := func(system string, disks ...*loopdisk.Disk) *node { return withData(t, system, disks...).numbered() }
	m := boots(system, data)
	m.mustMount(disk)
	m.write("var/mnt/data/mine", "kept")
	m.off()
	copyDisk(t, data, pods)
	m = boots(system, data, pods)
	m.mustMount(disk)
	if got := m.read("var/mnt/data/mine"); got != "kept" {
		t.Errorf("the file has %q", got)
	}
	m.off()
	_, _, err := boots(system, pods).volumes.mount(t.Context(), disk)
	refused(t, err, "the disk of data (1 GiB, serial serial of "+data.Name+") is missing")
}

// A partition for which there is no room doesn't keep the others from being mounted.
func TestPartitionWithoutRoom(t *testing.T) {
	system, data := t.TempDir(), loopdisk.New(t, gib)
	first := partitionOf("first", 0, config.XFS)
	m := withData(t, system, data)
	m.mustMount(dataDisk(data.Path, first))
	m.write("var/mnt/first/mine", "kept")
	m.off()
	m = withData(t, system, data)
	_, made, err := m.volumes.mount(t.Context(), dataDisk(data.Path, first, partitionOf("more", 0, config.XFS)))
	refused(t, err, "has no room for more: 0 B of at least 320 MiB. Correct the partitions in machine.disks")
	if made["first"].Size == "" || made["first"].Layers != "xfs" || made["more"] != (Status{}) || m.read("var/mnt/first/mine") != "kept" {
		t.Errorf("mounted: %v", made)
	}
}

// A damaged ext4 is repaired.
func TestDamagedExt4(t *testing.T) {
	system, data := t.TempDir(), loopdisk.New(t, gib)
	disk := dataDisk(data.Path, partitionOf("data", 0, config.Ext4))
	m := withData(t, system, data)
	m.mustMount(disk)
	m.write("var/mnt/data/mine", "kept")
	m.off()
	data.WriteAt(mib+4096, strings.Repeat("damage", 600)) // the group descriptors
	unix.Sync()
	m = withData(t, system, data)
	m.mustMount(disk)
	if got := m.read("var/mnt/data/mine"); got != "kept" || !strings.Contains(m.console.String(), "is repaired") {
		t.Errorf("the file has %q:\n%s", got, m.console.String())
	}
}
