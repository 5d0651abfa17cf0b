//go:build e2e && long

package media

import (
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/fat32"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
)

// The image of a disk boots with either firmware, after it was written to a larger disk: EPHEMERAL has the rest of it.
// The machine with a BIOS has its configuration from a volume of NoCloud. The one with a UEFI waits for its
// configuration. Neither installs anything: the system on the disk is good. (S-374) TestS333CreateFromDisk, in package
// create, is about a Ready node.
func TestDiskImage(t *testing.T) {
	for firmware, uefi := range map[string]bool{"bios": false, "uefi": true} {
		t.Run(firmware, func(t *testing.T) {
			o, setup := media.Options{Args: args, Version: "v1.0.0"}, func(*qemu.Options) {}
			if !uefi {
				o.Args, setup = append([]string{"garboard.platform=nocloud"}, args...), noCloud(t)
			}
			c, m := e2etest.Start(t, "disk-"+firmware, qemu.QEMU, e2etest.Nodes(1, 0), e2etest.DiskImage(t, o), func(o *qemu.Options) {
				o.Boot.UEFI, o.Unconfigured, o.MemoryMiB = uefi, uefi, 1536
				// it waits for its bootstrap
				o.ControlPlanePatches = [][]byte{[]byte("machine: {type: controlplane}\n")}
				setup(o)
			})
			if uefi {
				c.Says(2*bootBudget, 0, "maintenance mode", "SHA-256")
				c.Eventually(bootBudget, "the console shows the status", func() error {
					if text := c.Text(); !strings.Contains(text, "\nstate       maintenance") {
						return errors.New("it doesn't yet")
					}
					return nil
				})
				m.Reached("maintenance mode, with a status on the console")
				c.Gbctl("-n", c.Nodes[0].Address.String(), "apply-config", "--insecure", "-f", c.Configuration(c.Node()))
			}
			c.Says(2*bootBudget, 0, "Garboard v1.0.0 runs from slot A, which is trying")
			m.Reached("the image boots")
			if !uefi {
				c.Says(bootBudget, 0, "machined", "configuration from platform nocloud")
			}
			c.Says(bootBudget, 0, "slot A is good")
			m.Reached("its system is good")
			// 6 GiB without the other partitions; the image has 3 GiB.
			if out := c.Gbctl("-n", c.Node(), "mounts"); !regexp.MustCompile(`/var +/dev/vda5 +xfs +5\.\d GiB`).MatchString(out) {
				t.Errorf("file systems:\n%s", out)
			}
		})
	}
}

// The image of a disk has the configuration of its machine, and an image for its pods: the machine has both from
// nowhere else.
func TestDiskImageWithConfiguration(t *testing.T) {
	source := httptest.NewServer(registry.New(e2etest.Built(t, qemu.QEMU).Layout))
	defer source.Close()
	bundle := filepath.Join(t.TempDir(), "images.tar")
	all := config.DefaultImages()
	pause := all[slices.IndexFunc(all, func(ref string) bool { return strings.Contains(ref, "/pause:") })]
	e2etest.Gbctl(t, "images", "bundle", "-O", bundle, "--registry-mirror", "*="+source.URL, pause)
	c, m := e2etest.Start(t, "disk-config", qemu.QEMU, e2etest.Nodes(1, 0), e2etest.OwnDisk(t, media.Options{Args: args, Version: "v1.0.0", Images: bundle}), func(o *qemu.Options) {
		o.Boot.UEFI, o.MemoryMiB = true, 1536
		o.ControlPlanePatches = [][]byte{[]byte("machine: {type: controlplane}\n")} // it waits for its bootstrap
	})
	c.Says(2*bootBudget, 0, "machined", "configuration from kernel argument")
	m.Reached("the image boots, and has its configuration")
	c.Says(bootBudget, 0, "images of the medium for k8s.io")
	c.Says(bootBudget, 0, "slot A is good")
	m.Reached("the image for pods is imported, and the system is good")
	if out := c.Gbctl("-n", c.Node(), "images", "-k"); !strings.Contains(out, pause) {
		t.Errorf("the node hasn't %s:\n%s", pause, out)
	}
	if out := c.Gbctl("-n", c.Node(), "mounts"); !regexp.MustCompile(`/var +/dev/vda6 +xfs +5\.\d GiB`).MatchString(out) {
		t.Errorf("file systems:\n%s", out)
	}
}

// noCloud gives a machine its configuration in a volume.
func noCloud(t *testing.T) e2etest.Option {
	t.Helper()
	volume := filepath.Join(t.TempDir(), "cidata")
	e2etest.WrapQEMU(t, `set -- "$@" -drive if=none,id=cidata,format=raw,readonly=on,file=`+volume+` -device qemu-xhci -device usb-storage,drive=cidata`, "")
	return func(o *qemu.Options) {
		o.Unconfigured = true
		o.Prepare = func(node string) error {
			config, err := os.ReadFile(filepath.Join(node, "config.yaml"))
			if err == nil {
				err = errors.Join(os.WriteFile(volume, nil, 0o600), os.Truncate(volume, volumeSize))
			}
			if err != nil {
				return err
			}
			return writeVolume(volume, 0, "cidata", map[string][]byte{"/user-data": config, "/meta-data": nil})
		}
	}
}

const volumeSize = 64 << 20

// writeVolume makes a FAT with files at an offset of a disk.
func writeVolume(disk string, at int64, label string, content map[string][]byte) (err error) {
	out, err := os.OpenFile(disk, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	files, err := fat32.Create(file.New(out, false), volumeSize, at, 512, label, false)
	if err != nil {
		return err
	}
	for name, text := range content {
		f, err := files.OpenFile(name, os.O_CREATE|os.O_RDWR)
		if err == nil {
			_, err = f.Write(text)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
