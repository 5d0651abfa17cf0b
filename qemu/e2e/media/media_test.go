//go:build e2e && long

// Package media tests what a machine boots from, with real firmware.
package media

import (
	"bufio"
	"encoding/base64"
	"io"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network/registry"
	"github.com/garboard-os/garboard/qemu/vm"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

// bootBudget is for firmware, boot loader and kernel, as on real hardware, until the machine
// is on the network.
const bootBudget = 40 * time.Second

// systemBudget is for an operation that restarts a machine, until its node is Ready again.
const systemBudget = 3 * time.Minute

// diskGiB is the size of a disk with room for two systems and all images, in GiB.
const diskGiB = 10

// A UEFI boots the ISO from a CD drive: the machine has no configuration, and waits for one. At its console, it gets
// another address, and is restarted. With the command that its console shows, it gets a configuration, and installs
// itself: the system of its disk is good. It waits for its bootstrap: TestUpgradeKeepsData, in package installed, is
// about a Ready node that was installed from such a medium.
func TestMediumInUEFI(t *testing.T) {
	medium, keyboard := e2etest.Medium(t, media.Options{Args: args}), typing(t)
	c, m := e2etest.Start(t, "medium-uefi", qemu.QEMU, medium, func(o *qemu.Options) {
		o.Unconfigured, o.Boot.UEFI, o.MemoryMiB = true, true, 1536
		o.ControlPlanePatches = [][]byte{[]byte("machine: {type: controlplane}\n")}
		o.Hardware = []vm.Hardware{{NIC: "e1000", Disk: vm.SATA}}
	})
	c.Says(bootBudget, 0, "maintenance mode", "SHA-256")
	m.Reached("maintenance mode")

	keyboard.types(t, "network eth0 10.5.0.77/24 10.5.0.1")
	c.Says(bootBudget, 0, "maintenance mode: API at https://10.5.0.77")
	t.Log(c.Inside(c.Network()).Gbctl("-n", "10.5.0.77", "disks", "--insecure"))
	m.Reached("another address, by the console")
	before := len(c.Text())
	keyboard.types(t, "reboot")
	node := c.Nodes[0].Address.String()
	line := c.Says(bootBudget, before, "maintenance mode: API at https://"+node)
	m.Reached("a restart, by the console")

	_, command, _ := strings.Cut(line.Text, "apply a configuration with: gbctl ")
	c.Gbctl(strings.Fields(strings.Replace(command, "FILE", c.Configuration(c.Node()), 1))...)
	c.Says(bootBudget, before, "on the medium GARBOARD")
	m.Reached("the machine has a configuration, and installs itself")
	c.Says(2*bootBudget, before, "runs from slot A, which is trying")
	m.Reached("the disk boots")
	c.Says(bootBudget, before, "slot A is good")
	m.Reached("its system is good")
}

// keyboard is a path to a serial line.
type keyboard string

// typing connects the serial line of the machine that the test starts to a socket, too.
func typing(t *testing.T) keyboard {
	t.Helper()
	path := filepath.Join(t.TempDir(), "line")
	e2etest.WrapQEMU(t, "", `
  file,id=console,*) a="socket,id=console,path=`+path+`,server=on,wait=off,logappend=on,logfile=${a##*path=}" ;;`)
	return keyboard(path)
}

func (k keyboard) types(t *testing.T, line string) {
	t.Helper()
	conn, err := net.Dial("unix", string(k))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, line+"\n"); err != nil {
		t.Fatal(err)
	}
	// QEMU reads no more once the connection is closed: the machine has to have it.
	_ = conn.SetReadDeadline(time.Now().Add(bootBudget))
	for echo := bufio.NewReader(conn); ; {
		text, err := echo.ReadString('\n')
		if err != nil {
			t.Fatalf("the machine hasn't read what was typed: %v", err)
		}
		if strings.Contains(text, line) {
			return
		}
	}
}

// A BIOS boots the same ISO from a USB stick. It has a configuration: the machine installs itself with it, in the
// memory that the design promises. Its disk boots in another machine, too, with a UEFI and with other devices.
func TestMediumInBIOS(t *testing.T) {
	dir := t.TempDir()
	e2etest.Gbctl(t, "gen", "config", "medium", "https://10.5.0.2:6443", "--output-dir", dir, "--install-disk", "/dev/nvme0n1")
	config, err := os.ReadFile(filepath.Join(dir, "controlplane.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	medium := e2etest.Medium(t, media.Options{Args: args, Config: config})
	c, m := e2etest.Start(t, "medium-bios", qemu.QEMU, medium, func(o *qemu.Options) {
		o.Unconfigured = true
		o.MemoryMiB = 1024
		o.Hardware = []vm.Hardware{{NIC: "e1000e", Disk: vm.NVMe, Medium: vm.Stick}}
	})
	c.Says(bootBudget, 0, "machined", "configuration from kernel argument")
	m.Reached("the configuration on the medium")
	c.Says(bootBudget, 0, "end: running: stop all services, and restart the machine")
	m.Reached("the system is on the disk")
	c.Says(2*bootBudget, 0, "runs from slot A, which is trying")
	m.Reached("the disk boots")
	c.Says(bootBudget, 0, "slot A is good")
	m.Reached("the system is good")

	if err := c.Cut(t.Context(), c.Nodes[0].Name); err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(c.Dir(), c.Nodes[0].Name, "disk.img")
	c, m = e2etest.Start(t, "medium-moved", qemu.QEMU, func(o *qemu.Options) {
		o.Unconfigured, o.Boot.UEFI, o.MemoryMiB = true, true, 1024
		o.Hardware = []vm.Hardware{{NIC: "e1000", Disk: vm.SATA, Medium: vm.OwnDisk}}
		o.Prepare = func(dir string) error { return os.Rename(disk, filepath.Join(dir, "disk.img")) }
	})
	c.Says(2*bootBudget, 0, "machined", "configuration from state")
	c.Says(bootBudget, 0, "runs from slot A, which is good")
	m.Reached("the disk boots in another machine")
	c.Says(bootBudget, 0, "has address 10.5.0.2")
	m.Reached("it has its network")
}

// A machine installs itself from a CD, and is a Ready node, with the images of the CD: there is no other image in its
// network. It is upgraded from a bundle on a workstation. Its hypervisor gives it its configuration in a string of the
// SMBIOS. No packet is for an address outside of its network.
func TestImagesOnTheMedium(t *testing.T) {
	source := httptest.NewServer(registry.New(e2etest.Built(t, qemu.QEMU).Layout))
	defer source.Close()
	bundle, nothing := filepath.Join(t.TempDir(), "images.tar"), t.TempDir()
	e2etest.Gbctl(t, "images", "bundle", "-O", bundle, "--registry-mirror", "*="+source.URL)
	if _, err := layout.Write(nothing, empty.Index); err != nil {
		t.Fatal(err)
	}
	system, upgrade := e2etest.Installer(t, media.Options{Args: args, Version: "v2.0.0"})
	built := httptest.NewServer(registry.New(system))
	defer built.Close()
	next := filepath.Join(t.TempDir(), "system.tar")
	e2etest.Gbctl(t, "images", "bundle", "-O", next, "--registry-mirror", "*="+built.URL, upgrade)
	archive, err := registry.OpenArchive(next)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { archive.Close() })
	workstation := httptest.NewServer(registry.Serve(archive))
	t.Cleanup(workstation.Close)
	c, m := e2etest.Start(t, "cd-images", qemu.QEMU, e2etest.Medium(t, media.Options{Args: args, Version: "v1.0.0", Images: bundle}), func(o *qemu.Options) {
		o.Images, o.Mirrors = nothing, map[string][]string{e2etest.InstallerHost: {workstation.URL}}
		smbios(t, o)
	})
	outside := c.Audit()
	c.Says(bootBudget, 0, "machined", "configuration from SMBIOS")
	m.Reached("the configuration in the SMBIOS")
	c.Says(2*bootBudget, 0, "runs from slot A, which is trying")
	m.Reached("the disk boots")
	c.Says(bootBudget, 0, "importing 2 images of the medium for system")
	c.Says(bootBudget, 0, "images of the medium for k8s.io")
	m.Reached("the images are imported")
	c.Ready(m)
	c = c.Patient(systemBudget)
	c.Gbctl("-n", c.Node(), "upgrade", "--image", upgrade)
	if out := c.Gbctl("-n", c.Node(), "get", "slots"); !regexp.MustCompile(`good +v2\.0\.0 +yes`).MatchString(out) {
		t.Errorf("after the upgrade:\n%s", out)
	}
	c.Ready(m)
	m.Reached("the machine is upgraded")
	if text := outside(); text != "" {
		t.Errorf("packets were for addresses outside of the nodes' network:\n%s", text)
	}
}

// smbios gives machines their configurations in a string of the SMBIOS.
func smbios(t *testing.T, o *qemu.Options) {
	t.Helper()
	text := filepath.Join(t.TempDir(), "string")
	e2etest.WrapQEMU(t, `set -- "$@" -smbios type=11,path=`+text, "")
	o.Unconfigured, o.Prepare = true, func(node string) error {
		config, err := os.ReadFile(filepath.Join(node, "config.yaml"))
		if err != nil {
			return err
		}
		return os.WriteFile(text, []byte("garboard.config=data:;base64,"+base64.StdEncoding.EncodeToString(config)), 0o600)
	}
}

// S-333: a machine of a development cluster boots over HTTP, with a UEFI, and is installed from the registry of the
// cluster. Its system is good. It waits for its bootstrap: TestS333CreateFromNetwork, in package create, is about a
// Ready node.
func TestClusterFromTheNetwork(t *testing.T) {
	c, m := e2etest.Start(t, "http-boot", qemu.QEMU, e2etest.Nodes(1, 0), e2etest.NetworkBoot(t, media.Options{Args: args, Version: "v1.0.0"}), func(o *qemu.Options) {
		o.Boot.UEFI, o.MemoryMiB = true, 2048
		o.ControlPlanePatches = [][]byte{[]byte("machine: {type: controlplane}\n")}
	})
	c.Says(2*bootBudget, 0, "installed from "+media.InstallerImage("v1.0.0"))
	m.Reached("the system is on the disk")
	c.Says(2*bootBudget, 0, "Garboard v1.0.0 runs from slot A, which is trying")
	c.Says(bootBudget, 0, "slot A is good")
	m.Reached("the system of the disk is good")
}

var args = e2etest.SerialArgs()
