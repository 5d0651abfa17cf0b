//go:build kernel

package services

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat32"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/esp"
	"github.com/garboard-os/garboard/boot/signed"
	"github.com/garboard-os/garboard/tools/testing/bootloader"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/signer"
	"github.com/garboard-os/garboard/tools/testing/uki"
	"github.com/garboard-os/garboard/tools/testing/uml"
)

const (
	systemDisk = "/dev/sda"
	efiDevice  = systemDisk + "1"
	stick      = "/dev/sdb"
)

// A computer is the hardware of a machine: its disk, a stick with a system, and the firmware with a boot loader.
type computer struct {
	t       *testing.T
	systems map[string]string // versions, by the hash of the file
}

// newComputer makes the test's process see the root file system of a node.
func newComputer(t *testing.T) *computer {
	t.Helper()
	uml.Booted(t)
	program, err := elf.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	if libraries, err := program.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Fatalf("the program of this test, which is that of the systems, needs %s, %v: build it with CGO_ENABLED=0, as PID 1's", libraries, err)
	}
	c := &computer{t: t, systems: map[string]string{}}
	c.root()
	for _, module := range []string{"sd_mod", "target_core_mod"} { // nobody asks for these
		helper, err := os.ReadFile("/proc/sys/kernel/modprobe")
		c.must(err)
		c.must(exec.Command(strings.TrimSpace(string(helper)), "-q", "--", module).Run())
	}
	c.must(unix.Mount("configfs", "/sys/kernel/config", "configfs", 0, ""))
	t.Cleanup(func() { c.must(unix.Unmount("/sys/kernel/config", 0)) })
	c.attach(0, systemDisk, boot.MinDisk)
	c.attach(1, stick, 512<<20)
	return c
}

func (c *computer) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// root is that of the guest, which is the host's, with the directories of a node, and the boot loaders. Their content
// is never run: e2e tests boot machines with the real ones.
func (c *computer) root() {
	dir := c.t.TempDir()
	upper, root := filepath.Join(dir, "upper"), filepath.Join(dir, "root")
	for _, d := range []string{boot.StateDir, boot.EFIDir, boot.EphemeralDir, boot.CNIPlugins, esp.LoaderDir, "/tmp"} {
		c.must(os.MkdirAll(filepath.Join(upper, d), 0o755))
	}
	for name, content := range map[string][]byte{
		esp.SystemdBoot: []byte("systemd-boot"), esp.GRUBRecord: make([]byte, 512), esp.GRUBProgram: bytes.Repeat([]byte("grub"), 1000),
	} {
		c.must(os.WriteFile(filepath.Join(upper, esp.LoaderDir, name), content, 0o600))
	}
	c.must(os.MkdirAll(filepath.Join(upper, filepath.Dir(signed.KeysFile)), 0o755))
	c.must(os.WriteFile(filepath.Join(upper, signed.KeysFile), signer.Public(c.t, signer.Release), 0o600))
	for _, d := range []string{root, filepath.Join(dir, "work")} {
		c.must(os.Mkdir(d, 0o755))
	}
	c.must(unix.Mount("overlay", root, "overlay", 0, "lowerdir=/,upperdir="+upper+",workdir="+filepath.Join(dir, "work")))
	host, err := os.Open("/")
	c.must(err)
	mounts := []string{"/proc", "/sys", "/dev", "/run", "/tmp"}
	for _, d := range mounts {
		c.must(unix.Mount(d, root+d, "", unix.MS_BIND|unix.MS_REC, ""))
	}
	c.must(unix.Chroot(root))
	c.must(os.Chdir("/"))
	c.t.Cleanup(func() {
		c.must(host.Chdir())
		c.must(errors.Join(unix.Chroot("."), host.Close()))
		c.must(unix.Unmount(root, unix.MNT_DETACH))
	})
}

// attach makes a SCSI disk of a sparse file, and waits for its name. It is the disk of a machine to all programs,
// unlike a loop device.
func (c *computer) attach(number int, name string, size int64) {
	c.t.Helper()
	backing := filepath.Join(c.t.TempDir(), "disk")
	c.must(os.WriteFile(backing, nil, 0o600))
	c.must(os.Truncate(backing, size))
	const target = "/sys/kernel/config/target"
	core := fmt.Sprintf("%s/core/fileio_%d/disk", target, number)
	port := fmt.Sprintf("%s/loopback/naa.500140500000001%d/tpgt_1", target, number)
	for _, dir := range []string{core, port + "/lun/lun_0"} {
		c.must(os.MkdirAll(dir, 0o755))
	}
	for _, set := range [][2]string{
		{core + "/control", fmt.Sprintf("fd_dev_name=%s,fd_dev_size=%d", backing, size)},
		{core + "/enable", "1"},
		{port + "/nexus", fmt.Sprintf("naa.500140500000002%d", number)},
	} {
		c.must(os.WriteFile(set[0], []byte(set[1]), 0))
	}
	link := port + "/lun/lun_0/disk"
	c.must(os.Symlink(core, link))
	c.t.Cleanup(func() {
		for _, made := range []string{link, port + "/lun/lun_0", port, filepath.Dir(port), core, filepath.Dir(core)} {
			c.must(os.Remove(made))
		}
	})
	eventually.That(c.t, 10*time.Second, name+" is there", func() error {
		f, err := os.Open(name) // the name is there before the disk can be read
		if err == nil {
			err = f.Close()
		}
		return err
	})
}

// format makes a FAT of a block device, as the tool that makes media does it: mkfs.fat isn't on every machine that runs
// this test.
func (c *computer) format(device, label string) {
	c.t.Helper()
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	c.must(err)
	defer f.Close()
	size, err := f.Seek(0, 2)
	c.must(err)
	made, err := fat32.Create(file.New(f, false), size, 0, 512, label, true)
	c.must(err)
	c.must(errors.Join(made.Close(), f.Sync()))
}

// with mounts a FAT until use returns.
func (c *computer) with(device string, use func(dir string) error) {
	c.t.Helper()
	dir := c.t.TempDir()
	c.must(unix.Mount(device, dir, "vfat", 0, ""))
	err := use(dir)
	c.must(errors.Join(err, unix.Unmount(dir, 0)))
}

// release makes a system, whose program of PID 1 is this test's, and puts it into a directory with its description,
// which a maker has signed.
func (c *computer) release(dir, version, maker string) {
	c.t.Helper()
	program, err := os.ReadFile("/proc/self/exe")
	c.must(err)
	image := uki.ImageOf(c.t, version, "quiet", string(program))
	sum := sha256.Sum256(image)
	c.systems[hex.EncodeToString(sum[:])] = version
	for name, content := range signer.Signed(c.t, maker, esp.Medium{Version: version, File: "garboard.efi"}, image) {
		c.must(os.WriteFile(filepath.Join(dir, name), content, 0o600))
	}
	c.must(os.WriteFile(filepath.Join(dir, "garboard.efi"), image, 0o600))
}

// start lets a boot loader start a system from the disk, and returns the system's version and the kernel's command
// line.
func (c *computer) start(loader func(fs.FS) (bootloader.Start, error)) (version, line string) {
	c.t.Helper()
	c.with(efiDevice, func(dir string) error {
		start, err := loader(os.DirFS(dir))
		if err != nil {
			return err
		}
		content, err := os.ReadFile(filepath.Join(dir, start.System))
		if err != nil {
			return err
		}
		sum := sha256.Sum256(content)
		version, line = c.systems[hex.EncodeToString(sum[:])], start.Line
		if version == "" {
			return fmt.Errorf("%s, of %d bytes, isn't whole", start.System, len(content))
		}
		return start.Count(dir)
	})
	return version, line
}

// entries are the files of systemd-boot.
func (c *computer) entries() (names string) {
	c.t.Helper()
	c.with(efiDevice, func(dir string) error {
		found, err := filepath.Glob(filepath.Join(dir, "loader/entries/*"))
		for i := range found {
			found[i] = filepath.Base(found[i])
		}
		names = strings.Join(found, " ")
		return err
	})
	return names
}
