//go:build e2e && long

package media

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/network"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/qemu/vm"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/vishvananda/netlink"
)

const (
	// setBudget is for parts of the image that aren't in the cache.
	setBudget = 5 * time.Minute
	// loadBudget is for a firmware that searches, and loads 65 MB by TFTP.
	loadBudget = 90 * time.Second
	endBudget  = 5 * time.Second
)

// A BIOS boots over the network, from a computer that runs gbctl beside a DHCP server. QEMU's network cards have iPXE.
// The machine gets the configuration with its hardware address as name. This names the image that it is installed from.
// The control plane waits for its bootstrap: TestS333CreateFromNetwork, in package create, is about a Ready node with
// such a boot.
func TestNetworkInBIOS(t *testing.T) {
	r := newRack(t, vm.Config{Name: "e2e/netboot-bios", Hardware: vm.Hardware{NIC: "e1000e", Disk: vm.NVMe, Medium: vm.Network}, DiskGiB: 8})
	dir, configs := r.generate("/dev/nvme0n1"), t.TempDir()
	own := filepath.Join(configs, strings.ToUpper(strings.ReplaceAll(r.machine.HardwareAddr.String(), ":", "-"))+".yaml")
	if err := os.Rename(filepath.Join(dir, "controlplane.yaml"), own); err != nil {
		t.Fatal(err)
	}
	r.serve("--config-dir", configs)
	m := e2etest.Marks(t)
	r.powerOn()
	r.says(loadBudget, "(BIOS with iPXE, UUID ", "asks for a boot file: boot.ipxe", "has loaded vmlinuz in", "has loaded initramfs in")
	m.Reached("kernel and system are loaded")
	r.says(bootBudget, "gets its configuration: "+own)
	r.consoleSays(bootBudget, "configuration from kernel argument")
	m.Reached("it has its configuration")
	r.installed(m)
	r.interrupt()
}

// The network boot of a UEFI loads the unified kernel image by TFTP. The machine has no configuration, and waits for
// one. With the commands of the README, its owner makes it a Ready node.
func TestNetworkInUEFI(t *testing.T) {
	r := newRack(t, vm.Config{Name: "e2e/netboot-uefi", Hardware: vm.Hardware{Medium: vm.Network}, DiskGiB: 8,
		Variables: filepath.Join(t.TempDir(), "variables")})
	r.serve()
	m := e2etest.Marks(t)
	r.powerOn()
	r.says(loadBudget, "(UEFI, UUID ", "asks for a boot file: garboard.efi", "has loaded garboard.efi in")
	m.Reached("the unified kernel image is loaded")
	r.consoleSays(bootBudget, "maintenance mode: API at https://10.5.0.2")
	m.Reached("maintenance mode")
	if out := r.user("-n", "10.5.0.2", "disks", "--insecure"); !strings.Contains(out, "/dev/vda") {
		t.Error(out)
	}
	dir := r.generate("/dev/vda")
	t.Log(r.user("-n", "10.5.0.2", "apply-config", "--insecure", "-f", filepath.Join(dir, "init.yaml")))
	r.installed(m)
	r.ready(m)
	r.interrupt()
}

// UEFI HTTP boot loads the unified kernel image by HTTP, with the URL from gbctl and the address from the DHCP server.
func TestHTTPBootOfUEFI(t *testing.T) {
	r := newRack(t, vm.Config{Name: "e2e/netboot-http", Hardware: vm.Hardware{Medium: vm.HTTP}, DiskGiB: 8,
		Variables: filepath.Join(t.TempDir(), "variables")})
	r.serve()
	m := e2etest.Marks(t)
	r.powerOn()
	r.says(loadBudget, "(UEFI HTTP boot, UUID ", "asks for a boot file: garboard.efi", "has loaded garboard.efi in")
	m.Reached("the unified kernel image is loaded")
	r.consoleSays(bootBudget, "maintenance mode: API at https://10.5.0.2")
	m.Reached("maintenance mode")
	r.interrupt()
}

// generate makes the configurations of a cluster, with the access to it, as a user does. Its images come from the
// registry of the network.
func (r *rack) generate(disk string) (dir string) {
	r.t.Helper()
	dir = r.t.TempDir()
	e2etest.Gbctl(r.t, "gen", "config", "netboot", "https://10.5.0.2:6443", "--output-dir", dir, "--install-disk", disk,
		"--registry-mirror", "*=http://10.5.0.1:5000", "--config-patch", "machine: {install: {image: "+r.installer+"}}")
	r.t.Setenv(client.EnvConfig, filepath.Join(dir, "garboardconfig"))
	r.t.Setenv("KUBECONFIG", filepath.Join(dir, "kubeconfig"))
	return dir
}

// user runs gbctl on the computer.
func (r *rack) user(args ...string) string {
	r.t.Helper()
	out, err := e2etest.GbctlIn(r.t, r.computer, bootBudget*r.slower(), args...)
	if err != nil {
		r.t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// installed waits until a machine has installed itself, and its system is good.
func (r *rack) installed(m *e2etest.Mark) {
	r.t.Helper()
	r.consoleSays(bootBudget, "installed from "+r.installer, "end: running: stop all services, and restart the machine")
	m.Reached("the system is on the disk")
	r.powerOn() // QEMU ends where a machine restarts
	r.consoleSays(2*bootBudget, "Garboard v1.0.0 runs from slot A, which is trying", "slot A is good")
	m.Reached("the system of the disk is good")
}

// ready waits until the machine is a Ready node, with the commands of the README.
func (r *rack) ready(m *e2etest.Mark) {
	r.t.Helper()
	r.user("-n", "10.5.0.2", "health", "--wait", (bootBudget * r.slower()).String())
	r.user("-n", "10.5.0.2", "kubeconfig")
	eventually.That(r.t, bootBudget*r.slower(), "the node is Ready", func() error {
		cmd := exec.CommandContext(r.t.Context(), r.kubectl, "get", "nodes", "--no-headers")
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err := r.computer.Do(cmd.Start)
		if err == nil {
			err = cmd.Wait()
		}
		if err != nil || strings.Count(out.String(), " Ready ") != 1 {
			err = fmt.Errorf("%w: %s", cmp.Or(err, errors.New("not yet")), &out)
		}
		return err
	})
	m.Reached("the node is Ready")
}

// A rack is a network with a DHCP server, a machine without a medium, and a computer for gbctl.
//
//	namespace of the network: bridge, DHCP ─┬─ tap ── machine
//	                                        └─ veth ─ namespace of the computer: gbctl media serve
type rack struct {
	t        *testing.T
	lan      *network.LAN
	computer *osthread.Thread
	link     string // of the computer
	node     network.Node
	machine  vm.Config
	running  *vm.Running
	// installer is the reference of the image that the machine is installed from.
	installer, kubectl string

	gbctl *exec.Cmd
	out   lines
}

// lines is the output of gbctl.
type lines struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// newRack has the images of a cluster, and an installer image, in the registry of its network.
func newRack(t *testing.T, machine vm.Config) *rack {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: a network namespace")
	}
	e2etest.Pace(t)
	made := e2etest.Built(t, qemu.QEMU)
	layout, installer := e2etest.Installer(t, media.Options{Args: args, Version: "v1.0.0"})
	r := &rack{t: t, installer: installer, kubectl: made.Kubectl(), node: network.Node{Name: "machine", Address: netip.MustParseAddr("10.5.0.2")}}
	computer := network.Node{Name: "computer", Address: netip.MustParseAddr("10.5.0.3")}
	var err error
	r.lan, err = network.New(network.Config{Cluster: "netboot", Prefix: netip.MustParsePrefix("10.5.0.0/24"),
		Nodes: []network.Node{r.node, computer}, Images: []string{layout, made.Layout}}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.lan.Close() })
	dhcp, err := r.lan.ServeDHCP()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dhcp.Close() })
	if r.computer, err = osthread.NewInNamespace(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.computer.Close() })
	if r.link, err = r.lan.Veth(computer); err == nil {
		err = r.plug(computer.Address.String() + "/24")
	}
	if err != nil {
		t.Fatal(err)
	}
	accelerator := "tcg"
	if vm.ProbeKVM(t.Context()) == nil {
		accelerator = "kvm"
	}
	dir := t.TempDir()
	machine.Accelerator, machine.CPUs, machine.MemoryMiB = accelerator, 2, 2048
	machine.Console, machine.Chart, machine.Disk = filepath.Join(dir, "console"), filepath.Join(dir, "chart"), filepath.Join(dir, "disk")
	machine.HardwareAddr = network.HardwareAddress("netboot", r.node.Name)
	r.machine = machine
	return r
}

// plug moves the computer's end of its cable into the computer's namespace.
func (r *rack) plug(address string) error {
	var ns *os.File
	if err := r.computer.Do(func() (err error) { ns, err = os.Open("/proc/thread-self/ns/net"); return err }); err != nil {
		return err
	}
	defer ns.Close()
	err := r.lan.Thread().Do(func() error {
		link, err := netlink.LinkByName(r.link)
		if err != nil {
			return err
		}
		return netlink.LinkSetNsFd(link, int(ns.Fd()))
	})
	if err != nil {
		return err
	}
	return r.computer.Do(func() error {
		link, err := netlink.LinkByName(r.link)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(address)
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrAdd(link, a), netlink.LinkSetUp(link))
	})
}

// serve starts gbctl on the computer, as a user does, with files that it has built before.
func (r *rack) serve(more ...string) {
	r.t.Helper()
	set := filepath.Join(r.t.TempDir(), "pxe")
	build := []string{"media", "build", "pxe", "-O", set}
	for _, a := range args {
		build = append(build, "--extra-kernel-arg", a)
	}
	if _, err := e2etest.UserGbctl(r.t, setBudget, build...); err != nil {
		r.t.Fatal(err)
	}
	program, err := filepath.Abs("../../../out/gbctl") // UserGbctl has built it
	if err != nil {
		r.t.Fatal(err)
	}
	r.gbctl = exec.Command(program, append([]string{"media", "serve", "--interface", r.link, "--dir", set}, more...)...)
	r.gbctl.Stdout, r.gbctl.Stderr = &r.out, &r.out
	r.gbctl.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := r.computer.Do(r.gbctl.Start); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if r.gbctl.ProcessState == nil {
			_ = r.gbctl.Process.Kill()
			_ = r.gbctl.Wait()
		}
		if r.t.Failed() {
			console, _ := os.ReadFile(r.machine.Console)
			r.t.Logf("gbctl printed:\n%s\nthe console ends with:\n%s", &r.out, console[max(0, len(console)-4000):])
		}
	})
	r.says(setBudget, "machines in the network of "+r.link+" (10.5.0.3) can boot now")
}

// powerOn starts the machine, once its former run has ended.
func (r *rack) powerOn() {
	r.t.Helper()
	if r.running != nil {
		if _, err := r.running.Wait(); err != nil {
			r.t.Fatal(err)
		}
	}
	cable, err := r.lan.Tap(r.node)
	if err != nil {
		r.t.Fatal(err)
	}
	defer cable.Close()
	running, err := vm.Start(r.t.Context(), r.lan.Thread(), r.machine, cable)
	if err != nil {
		r.t.Fatal(err)
	}
	r.running = running
	r.t.Attr(e2etest.Booted, qemu.QEMU)
	r.t.Cleanup(func() {
		running.Cut()
		_, _ = running.Wait()
	})
}

// says waits until gbctl has printed all the parts.
func (r *rack) says(budget time.Duration, parts ...string) {
	r.t.Helper()
	r.wait(budget, "gbctl", r.out.String, parts)
}

func (r *rack) consoleSays(budget time.Duration, parts ...string) {
	r.t.Helper()
	r.wait(budget, "the console", func() string {
		text, _ := os.ReadFile(r.machine.Console) // there is none yet
		return string(text)
	}, parts)
}

// slower is how many times slower a machine is whose processor is emulated.
func (r *rack) slower() time.Duration {
	if r.machine.Accelerator == "kvm" {
		return 1
	}
	return 12
}

func (r *rack) wait(budget time.Duration, who string, said func() string, parts []string) {
	r.t.Helper()
	eventually.That(r.t, budget*r.slower(), fmt.Sprintf("%s prints %q", who, parts), func() error {
		for _, part := range parts {
			if !strings.Contains(said(), part) {
				return fmt.Errorf("%q isn't there", part)
			}
		}
		return nil
	})
}

// interrupt presses Ctrl-C: gbctl ends in an orderly way.
func (r *rack) interrupt() {
	r.t.Helper()
	ctx, cancel := eventually.Context(r.t.Context(), endBudget)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = r.gbctl.Process.Kill() })()
	if err := r.gbctl.Process.Signal(os.Interrupt); err != nil {
		r.t.Fatal(err)
	}
	if err := r.gbctl.Wait(); err != nil {
		r.t.Errorf("gbctl ended with %v", err)
	}
	r.t.Logf("gbctl printed:\n%s", &r.out)
}
