//go:build kernel

package disks

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/garboard-os/garboard/config"
	"golang.org/x/sys/unix"
)

const mib = 1 << 20

// dataDisk is an entry of machine.disks.
func dataDisk(device string, partitions ...config.DataPartition) config.DataDisk {
	return config.DataDisk{Name: "data", Device: device, Partitions: partitions}
}

func partitionOf(name string, size config.ByteSize, kind config.FileSystem) config.DataPartition {
	return config.DataPartition{Mountpoint: "/var/mnt/" + name, Size: size, FileSystem: kind}
}

// withData is a machine with a system, and a disk for data.
func withData(t *testing.T, system, data *loop, more ...*loop) *machineUnderTest {
	t.Helper()
	m := bootMachine(t, append(more, system, data)...)
	if _, err := m.disks.MountState(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.mustUp(config.Install{Disk: system.path})
	return m
}

func (m *machineUnderTest) mustMount(disk config.DataDisk) {
	m.t.Helper()
	if _, _, err := m.disks.mountDisk(m.t.Context(), disk); err != nil {
		m.t.Fatal(err)
	}
}

// statfs is the type of a file system, and its size in bytes.
func (m *machineUnderTest) statfs(dir string) (kind, size int64) {
	m.t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Join(m.dir, dir), &st); err != nil {
		m.t.Fatal(err)
	}
	return st.Type, int64(st.Blocks) * st.Bsize
}

// The partitions are made, found again under another name of the disk, and the last one grows with the disk. All data is kept.
func TestDataDisk(t *testing.T) {
	for last, magic := range map[config.FileSystem]int64{config.XFS: unix.XFS_SUPER_MAGIC, config.Ext4: unix.EXT4_SUPER_MAGIC} {
		t.Run(string(last), func(t *testing.T) {
			system, data := newLoop(t, 4*gib), newLoop(t, 2*gib)
			first, rest := partitionOf("first", 400*mib, config.Ext4), partitionOf("rest", 0, last)
			m := withData(t, system, data)
			m.mustMount(dataDisk(data.path, first, rest))
			m.mustMount(dataDisk(data.path, first, rest)) // nothing to do
			first.FileSystem = config.XFS                 // what is there stays
			if kind, _ := m.statfs("var/mnt/first"); kind != unix.EXT4_SUPER_MAGIC {
				t.Errorf("the first one is of type %x", kind)
			}
			kind, was := m.statfs("var/mnt/rest")
			if kind != magic || was < gib {
				t.Errorf("the rest has %s of type %x", bytesText(was), kind)
			}
			m.write("var/mnt/first/mine", "kept")
			m.write("var/mnt/rest/mine", "kept, too")
			m.off()
			data.enlarge(4 * gib)

			m = withData(t, system, data)
			m.mustMount(dataDisk("/dev/named-differently-today", first, rest))
			if got := m.read("var/mnt/first/mine") + ", " + m.read("var/mnt/rest/mine"); got != "kept, kept, too" {
				t.Errorf("after the second boot: %q", got)
			}
			if _, size := m.statfs("var/mnt/rest"); size-was < 2*gib*9/10 {
				t.Errorf("the rest has grown by %s of 2 GiB", bytesText(size-was))
			}
			if users, err := m.disks.UserDisks([]string{data.path}); err != nil || len(users) != 1 {
				t.Errorf("a reset can't wipe it while it is mounted: %v, %v", users, err)
			}
		})
	}
}

// A partition is added to a disk whose other one is in use, wherever the power was cut.
func TestPartitionIsAdded(t *testing.T) {
	for _, cut := range []string{"", "journal", "erase", "table", "partitions", "format more", "done"} {
		t.Run("cut before "+cut, func(t *testing.T) {
			system, data := newLoop(t, 4*gib), newLoop(t, 2*gib)
			first, more := partitionOf("first", 400*mib, config.XFS), partitionOf("more", 0, config.Ext4)
			m := withData(t, system, data)
			m.mustMount(dataDisk(data.path, first))
			m.write("var/mnt/first/mine", "kept")
			data.writeAt(mib+400*mib+100, "what was there before")
			if m.cut = cut; cut != "" {
				if _, _, err := m.disks.mountDisk(t.Context(), dataDisk(data.path, first, more)); !errors.Is(err, errPowerCut) {
					t.Fatalf("the power should have gone: %v", err)
				}
				m.off()
				m = withData(t, system, data)
			}
			m.mustMount(dataDisk(data.path, first, more))
			if kind, size := m.statfs("var/mnt/more"); kind != unix.EXT4_SUPER_MAGIC || size < gib {
				t.Errorf("the new one has %s of type %x", bytesText(size), kind)
			}
			if got := m.read("var/mnt/first/mine"); got != "kept" {
				t.Errorf("the first one has %q", got)
			}
		})
	}
}

// Half a file system of the first of two new partitions is made anew, before the second one is added.
func TestPartitionsAreAddedAfterAPowerCut(t *testing.T) {
	system, data := newLoop(t, 4*gib), newLoop(t, 2*gib)
	first, more, last := partitionOf("first", 400*mib, config.XFS), partitionOf("more", 400*mib, config.Ext4), partitionOf("last", 0, config.XFS)
	m := withData(t, system, data)
	m.mustMount(dataDisk(data.path, first))
	m.write("var/mnt/first/mine", "kept")
	m.cut = "format more"
	if _, _, err := m.disks.mountDisk(t.Context(), dataDisk(data.path, first, more, last)); !errors.Is(err, errPowerCut) {
		t.Fatalf("the power should have gone: %v", err)
	}
	m.off()
	data.writeAt(mib+400*mib+100, "half a file system")
	m = withData(t, system, data)
	m.mustMount(dataDisk(data.path, first, more, last))
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
			system, data := newLoop(t, 4*gib), newLoop(t, 2*gib)
			disk := dataDisk(data.path, partitionOf("first", 400*mib, config.XFS), partitionOf("rest", 0, config.Ext4))
			m := withData(t, system, data)
			m.cut = cut
			if _, _, err := m.disks.mountDisk(t.Context(), disk); !errors.Is(err, errPowerCut) {
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
	system := newLoop(t, 4*gib)
	for name, tt := range map[string]struct {
		size int64
		put  func(t *testing.T, l *loop)
		wipe bool
		want string
	}{
		"foreign":          {gib, func(t *testing.T, l *loop) { command(t, "mkfs.xfs", "-q", "-L", "photos", l.path) }, false, `holds xfs file system "photos", and isn't touched. Name another disk in machine.disks[data].device, or set machine.disks[data].wipe: true to erase this one`},
		"data of others":   {gib, func(t *testing.T, l *loop) { others(t, system, l) }, true, `has the data of other machine.disks (partitions "others" (xfs "others")), and isn't touched. Name another disk in machine.disks[data].device, or erase this one first: gbctl -n ADDRESS reset --user-disks-to-wipe`},
		"another system":   {4 * gib, func(t *testing.T, l *loop) { m := bootMachine(t, l); m.mustUp(config.Install{Disk: l.path}); m.off() }, true, "holds Garboard. Name another disk in machine.disks[data].device"},
		"a disk too small": {gib / 2, func(*testing.T, *loop) {}, false, "has no room for rest: 110 MiB of at least 320 MiB. Correct machine.disks[data].partitions"},
	} {
		t.Run(name, func(t *testing.T) {
			data := newLoop(t, tt.size)
			tt.put(t, data)
			before := data.edges()
			m := bootMachine(t, system, data)
			var plugged atomic.Bool // after the boot: a node with two systems doesn't start
			isDisk := m.disks.o.isDisk
			m.disks.o.isDisk = func(name string) bool { return isDisk(name) && (name != data.name || plugged.Load()) }
			m.mustUp(config.Install{Disk: system.path})
			plugged.Store(true)
			disk := dataDisk(data.path, partitionOf("first", 400*mib, config.XFS), partitionOf("rest", 0, config.XFS))
			disk.Wipe = tt.wipe
			_, _, err := m.disks.mountDisk(t.Context(), disk)
			refused(t, err, "disk "+data.path+" "+tt.want+". The disks here:\nDEVICE")
			if string(before) != string(data.edges()) {
				t.Error("the disk was written to")
			}
		})
	}
}

// others puts another entry of machine.disks onto a disk.
func others(t *testing.T, system, data *loop) {
	t.Helper()
	m := withData(t, system, data)
	disk := dataDisk(data.path, partitionOf("others", 0, config.XFS))
	disk.Name = "others"
	m.mustMount(disk)
	m.off()
}

// A system is never installed on a disk with data.
func TestSystemSparesDataDisks(t *testing.T) {
	system, data := newLoop(t, 4*gib), newLoop(t, 4*gib)
	others(t, system, data)
	m := bootMachine(t, data)
	refused(t, m.up(config.Install{Disk: data.path, Wipe: true}), "has the data of other machine.disks")
}

// A selector takes an empty disk, and none with other data; with two disks that have the partition, neither is mounted.
func TestDataDiskIsSelected(t *testing.T) {
	system, foreign, first, second := newLoop(t, 4*gib), newLoop(t, gib), newLoop(t, gib), newLoop(t, gib)
	command(t, "mkfs.xfs", "-q", "-L", "photos", foreign.path)
	disk := dataDisk("", partitionOf("data", 0, config.XFS))
	disk.DiskSelector.Size = config.DiskSize{Comparison: "==", Bytes: gib}
	m := withData(t, system, foreign)
	_, _, err := m.disks.mountDisk(t.Context(), disk)
	refused(t, err, `holds xfs file system "photos", and isn't touched`)
	m.off()

	m = withData(t, system, foreign, first)
	m.mustMount(disk)
	m.write("var/mnt/data/mine", "kept")
	m.off()
	copyDisk(t, first, second)
	m = withData(t, system, first, second)
	_, _, err = m.disks.mountDisk(t.Context(), disk)
	refused(t, err, first.path, second.path, "both have partitions of data")
	m.off()
	m = withData(t, system, second)
	m.mustMount(disk)
	if got := m.read("var/mnt/data/mine"); got != "kept" {
		t.Errorf("the copy has %q", got)
	}
	m.off()
	disk.Name, disk.Device = "more", "/dev/nothing"
	_, _, err = withData(t, system, foreign).disks.mountDisk(t.Context(), disk)
	refused(t, err, "no disk fits more of machine.disks. Plug it in, or correct device or diskSelector")
}

// While the disk of an entry is missing, an empty one isn't used in its place. The disk itself is, after it was erased.
func TestMissingDataDisk(t *testing.T) {
	system, data, spare := newLoop(t, 4*gib), newLoop(t, gib), newLoop(t, gib)
	disk := dataDisk("", partitionOf("data", 0, config.XFS))
	disk.DiskSelector.Size = config.DiskSize{Comparison: "==", Bytes: gib}
	m := withData(t, system, data)
	m.mustMount(disk)
	m.write("var/mnt/data/mine", "kept")
	m.off()

	m = withData(t, system, spare)
	_, _, err := m.disks.mountDisk(t.Context(), disk)
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
	spare.writeAt(0, strings.Repeat("\x00", 2*mib))
	spare.writeAt(gib-mib, strings.Repeat("\x00", mib))
	m = withData(t, system, spare)
	m.numbered()
	m.mustMount(disk)
}

func copyDisk(t *testing.T, from, to *loop) {
	t.Helper()
	in, err := os.Open(from.path)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to.path, os.O_WRONLY, 0)
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
	system, data, pods := newLoop(t, 4*gib), newLoop(t, gib), newLoop(t, gib)
	disk := dataDisk("", partitionOf("data", 0, config.XFS))
	disk.DiskSelector.Size = config.DiskSize{Comparison: "==", Bytes: gib}
	boots := func(disks ...*loop) *machineUnderTest {
		m := bootMachine(t, disks...).numbered()
		if _, err := m.disks.MountState(t.Context()); err != nil {
			t.Fatal(err)
		}
		m.mustUp(config.Install{Disk: system.path})
		return m
	}
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
	_, _, err := boots(system, pods).disks.mountDisk(t.Context(), disk)
	refused(t, err, "the disk of data (1 GiB, serial serial of "+data.name+") is missing")
}

// A partition for which there is no room doesn't keep the others from being mounted.
func TestPartitionWithoutRoom(t *testing.T) {
	system, data := newLoop(t, 4*gib), newLoop(t, gib)
	first := partitionOf("first", 0, config.XFS)
	m := withData(t, system, data)
	m.mustMount(dataDisk(data.path, first))
	m.write("var/mnt/first/mine", "kept")
	m.off()
	m = withData(t, system, data)
	_, sizes, err := m.disks.mountDisk(t.Context(), dataDisk(data.path, first, partitionOf("more", 0, config.XFS)))
	refused(t, err, "has no room for more: 0 B of at least 320 MiB. Correct the partitions in machine.disks")
	if sizes["first"] == "" || sizes["more"] != "" || m.read("var/mnt/first/mine") != "kept" {
		t.Errorf("mounted: %v", sizes)
	}
}

// A damaged ext4 is repaired.
func TestDamagedExt4(t *testing.T) {
	system, data := newLoop(t, 4*gib), newLoop(t, gib)
	disk := dataDisk(data.path, partitionOf("data", 0, config.Ext4))
	m := withData(t, system, data)
	m.mustMount(disk)
	m.write("var/mnt/data/mine", "kept")
	m.off()
	data.writeAt(mib+4096, strings.Repeat("damage", 600)) // the group descriptors
	unix.Sync()
	m = withData(t, system, data)
	m.mustMount(disk)
	if got := m.read("var/mnt/data/mine"); got != "kept" || !strings.Contains(m.console.String(), "is repaired") {
		t.Errorf("the file has %q:\n%s", got, m.console.String())
	}
}
