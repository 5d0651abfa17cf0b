// Package vm runs nodes as virtual machines in QEMU.
package vm

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu/exit"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/qemu/vm/qmp"
	"golang.org/x/sys/unix"
)

// qmpBudget is for QEMU to start and answer on a busy machine.
const qmpBudget = 20 * time.Second

// Config describes one virtual machine.
type Config struct {
	// Name identifies the machine among all of this computer, such as CLUSTER/NODE. The
	// machine's UUID and the serial number of its disk are made from it.
	Name            string
	Mainboard       string // with another one, the machine has another UUID, and the same disk
	Accelerator     string // kvm or tcg (software emulation)
	CPUs, MemoryMiB int
	// Kernel and Initramfs are files. Cmdline is added to the kernel's command line.
	Kernel, Initramfs, Cmdline string
	// Medium is a file that the firmware boots instead, from the device in Hardware.
	Medium string
	// Variables is a file for the variables of a UEFI; "": the machine has a BIOS.
	Variables     string
	Console       string // file to which the console is appended
	Chart         string // file for the boot chart
	Configuration string // file with the node's configuration; "": none
	Disk          string // file
	DiskImage     string // compressed image with which a new disk begins; "": it is empty
	DiskGiB       int    // negative: no disk
	Disks         int    // further ones are empty, and have the name of the first one with a number; 0: one
	Hardware      Hardware
	HardwareAddr  net.HardwareAddr
	Unplugged     bool          // the network card is connected to nothing
	ClockOffset   time.Duration // how wrong the hardware clock is
}

// Hardware names the devices of a machine as QEMU does (-device help). Zero: virtio devices.
type Hardware struct {
	NIC  string `json:"nic,omitempty"`
	Disk string `json:"disk,omitempty"` // a key of diskPaths
	// Medium is the device with the medium that a machine boots from: CD or Stick. Network,
	// HTTP and OwnDisk: it has no medium, and its firmware boots from its network card or its disk.
	Medium string `json:"medium,omitempty"`
	// Agent is the socket of the channel for a guest agent; "": there is none.
	Agent string `json:"agent,omitempty"`
	// Silent is a second card, with a carrier and with nobody behind it: Before or After the
	// other one in the order of the bus; "": there is none.
	Silent string `json:"silent,omitempty"`
}

const (
	virtioNIC  = "virtio-net-pci"
	virtioDisk = "virtio-blk-pci"

	// NVMe is a disk with a controller of its own.
	NVMe = "nvme"
	// SATA is a disk at the AHCI controller that the chipset q35 has.
	SATA = "ide-hd,bus=ide.0"

	// CD is a drive at the AHCI controller, and Stick is a disk at USB.
	CD    = "ide-cd,bus=ide.1"
	Stick = "usb-storage"
	// Network, HTTP and OwnDisk are not devices of their own. With HTTP, a UEFI doesn't look for
	// a TFTP server first, which takes it minutes; a BIOS has iPXE in any case.
	Network = "network"
	HTTP    = "http"
	OwnDisk = "disk"

	Before, After = "before", "after"
)

// The UEFI of Debian's package ovmf, and its variables in a new machine.
const (
	firmwareCode      = "/usr/share/OVMF/OVMF_CODE_4M.fd"
	firmwareVariables = "/usr/share/OVMF/OVMF_VARS_4M.fd"
)

// diskPaths are the names that Linux gives to the first disk of each kind.
var diskPaths = map[string]string{virtioDisk: "/dev/vda", NVMe: "/dev/nvme0n1", SATA: "/dev/sda"}

// DiskPath is where the machine has its disk.
func (h Hardware) DiskPath() string { return diskPaths[cmp.Or(h.Disk, virtioDisk)] }

// Descriptors that QEMU inherits, after the three standard ones.
const (
	monitorFD = 3 // the monitor: a socket without a name, so that no file is left behind
	cableFD   = 4 // the tap of its network card
)

// diskSerial is the length of a virtio disk's serial number (VIRTIO_BLK_ID_BYTES), and of an
// NVMe and a SATA disk's.
const diskSerial = 20

// arguments returns the command line of QEMU. The emulated processor has no cx16: with it,
// half the boots of a 6.12 kernel died of a double fault in QEMU 7.2. It has no erms and no
// fsrm either. They declare that one instruction clears and copies memory fast (Intel's
// optimization manual, "Enhanced REP MOVSB and STOSB"). The kernel and Go then use that
// instruction, which is emulated byte by byte: without these flags, the API answered 190
// seconds after power-on instead of 360.
func (c Config) arguments(now time.Time) []string {
	accelerator, cpu := "tcg,thread=multi", "max,cx16=off,erms=off,fsrm=off"
	if c.Accelerator == "kvm" {
		accelerator, cpu = "kvm", "host"
	}
	args := []string{
		"-name", option(c.Name),
		"-accel", accelerator, "-cpu", cpu, "-machine", "q35",
		"-smp", strconv.Itoa(c.CPUs), "-m", strconv.Itoa(c.MemoryMiB),
		"-uuid", machineUUID(c.Name + c.Mainboard),
		// A reset ends QEMU, and the host process starts it again, as it does with containers.
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-chardev", "file,id=console,append=on,path=" + option(c.Console),
		"-serial", "chardev:console",
		// The node writes the complete boot chart to the second port, once per boot.
		"-serial", "file:" + option(c.Chart),
	}
	args = append(args, c.system()...)
	if c.ClockOffset != 0 {
		args = append(args, "-rtc", "base="+now.Add(c.ClockOffset).UTC().Format("2006-01-02T15:04:05"))
	}
	if c.Configuration != "" {
		args = append(args, "-fw_cfg", "name=opt/dev.garboard/config,file="+option(c.Configuration))
	}
	if c.DiskGiB >= 0 {
		args = append(args,
			"-drive", "if=none,id=disk,format=raw,discard=unmap,file="+option(c.Disk),
			"-device", cmp.Or(c.Hardware.Disk, virtioDisk)+",drive=disk"+c.order(1)+",serial="+machineUUID(c.Name)[:diskSerial])
	}
	for i := 2; i <= c.Disks; i++ {
		args = append(args,
			"-drive", fmt.Sprintf("if=none,id=disk%d,format=raw,discard=unmap,file=%s", i, option(c.disk(i))),
			"-device", fmt.Sprintf("%s,drive=disk%d,serial=%s", virtioDisk, i, machineUUID(fmt.Sprintf("%s/%d", c.Name, i))[:diskSerial]))
	}
	if c.Hardware.Agent != "" {
		args = append(args, "-device", "virtio-serial-pci",
			"-chardev", "socket,id=agent,server=on,wait=off,path="+option(c.Hardware.Agent),
			"-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0")
	}
	cards := [][]string{{"-netdev", c.network(), "-device", c.networkCard()}}
	silent := []string{"-netdev", "hubport,id=silent,hubid=1", "-device", virtioNIC + ",netdev=silent"}
	switch c.Hardware.Silent {
	case Before:
		cards = slices.Insert(cards, 0, silent)
	case After:
		cards = append(cards, silent)
	}
	args = append(args, slices.Concat(cards...)...)
	args = append(args, "-device", "virtio-rng-pci", "-device", "i6300esb", "-action", "watchdog=reset")
	return append(args, monitorArguments()...)
}

// KernelArgs are the kernel arguments that machines need because of their accelerator. Go's runtime sleeps for 20 µs at
// a time while a program works. With high-resolution timers, each of these sleeps ends with an interrupt: about 1,000
// in a second, on each processor. An emulated processor takes long for an interrupt.
func KernelArgs(accelerator string) []string {
	if accelerator == "kvm" {
		return nil
	}
	return []string{"highres=off"}
}

// disk is the file of a further disk.
func (c Config) disk(i int) string { return fmt.Sprintf("%s-%d", c.Disk, i) }

// system returns what the machine boots.
func (c Config) system() (args []string) {
	if c.Variables != "" {
		args = append(args,
			"-drive", "if=pflash,format=raw,readonly=on,file="+firmwareCode,
			"-drive", "if=pflash,format=raw,file="+option(c.Variables))
	}
	if c.Hardware.Medium == HTTP && c.Variables != "" {
		args = append(args, "-fw_cfg", "name=opt/org.tianocore/IPv4PXESupport,string=n", "-fw_cfg", "name=opt/org.tianocore/IPv6PXESupport,string=n")
	}
	if c.fromNetwork() || c.Hardware.Medium == OwnDisk {
		return args
	}
	if c.Medium == "" {
		added := strings.Fields(c.Cmdline)
		cmdline := slices.Concat([]string{"console=ttyS0", "quiet", "panic=-1", "garboard.chart=/dev/ttyS1"}, media.Hardening(added...), KernelArgs(c.Accelerator), added)
		return append(args, "-kernel", c.Kernel, "-initrd", c.Initramfs, "-append", strings.Join(cmdline, " "))
	}
	device := cmp.Or(c.Hardware.Medium, CD)
	if device == Stick {
		args = append(args, "-device", "qemu-xhci")
	}
	return append(args,
		"-drive", "if=none,id=medium,format=raw,readonly=on,file="+option(c.Medium),
		"-device", device+",drive=medium"+c.order(c.mediumOrder()))
}

// order is the place of a disk or medium in the order in which it is booted. A UEFI has its own order, in its
// variables, and the node adds its disk to that. From a network card it would boot last.
func (c Config) order(index int) string {
	if c.Variables != "" && !c.fromNetwork() {
		return ""
	}
	return fmt.Sprintf(",bootindex=%d", index)
}

func (c Config) fromNetwork() bool { return c.Hardware.Medium == Network || c.Hardware.Medium == HTTP }

// mediumOrder is the place of what a machine is installed from: before an empty disk, and after one that boots.
func (c Config) mediumOrder() int {
	if bootable(c.Disk) {
		return 2
	}
	return 0
}

// bootable reports whether a disk has a boot record. After an installation, a person takes the medium out, or lets the
// firmware start the disk first: a BIOS starts no other disk if the first one can't be started.
func bootable(disk string) bool {
	f, err := os.Open(disk)
	if err != nil {
		return false
	}
	defer f.Close()
	var code [2]byte
	_, err = f.ReadAt(code[:], 0)
	return err == nil && code != [2]byte{} && code != [2]byte{0xcd, 0x18}
}

func monitorArguments() []string {
	return []string{
		"-chardev", fmt.Sprintf("socket,id=monitor,fd=%d", monitorFD),
		"-mon", "chardev=monitor,mode=control",
		"-S", // the guest waits for "cont", so that no event is missed
	}
}

func (c Config) networkCard() string {
	card := cmp.Or(c.Hardware.NIC, virtioNIC) + ",netdev=net,mac=" + c.HardwareAddr.String()
	if !c.fromNetwork() {
		return card
	}
	card += c.order(c.mediumOrder())
	if c.Variables != "" {
		card += ",romfile=" // otherwise QEMU's iPXE replaces what the UEFI itself has
	}
	return card
}

func (c Config) network() string {
	if c.Unplugged {
		return "hubport,id=net,hubid=0"
	}
	return fmt.Sprintf("tap,id=net,fd=%d", cableFD)
}

// option escapes text for QEMU's option lists: a comma is written twice.
func option(text string) string { return strings.ReplaceAll(text, ",", ",,") }

// machineUUID returns a machine's hardware identity: always the same for a name (RFC 9562,
// version 8: custom bits).
func machineUUID(name string) string {
	sum := sha256.Sum256([]byte("garboard machine " + name))
	sum[6] = sum[6]&0x0f | 0x80
	sum[8] = sum[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[0:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

// Start starts a machine, whose network card is the tap cable. QEMU ends when the thread
// ends. ctx is needed only until the machine runs. The caller closes cable afterwards: QEMU
// has a descriptor of its own.
func Start(ctx context.Context, thread *osthread.Thread, c Config, cable *os.File) (*Running, error) {
	if c.DiskGiB >= 0 {
		if err := makeDisk(c.Disk, c.DiskImage, int64(c.DiskGiB)<<30); err != nil {
			return nil, fmt.Errorf("disk: %w", err)
		}
	}
	for i := 2; i <= c.Disks; i++ {
		if err := makeDisk(c.disk(i), "", int64(c.DiskGiB)<<30); err != nil {
			return nil, fmt.Errorf("disk: %w", err)
		}
	}
	if c.Variables != "" {
		if err := makeVariables(c.Variables); err != nil {
			return nil, err
		}
	}
	return launch(ctx, thread, c.arguments(time.Now()), cable)
}

// launch starts QEMU, and starts the guest once the monitor answers.
func launch(ctx context.Context, thread *osthread.Thread, args []string, inherited ...*os.File) (*Running, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("monitor: %w", err)
	}
	r := &Running{done: make(chan struct{})}
	r.cmd = exec.Command(Program, args...)
	r.cmd.ExtraFiles = append([]*os.File{theirs}, inherited...) // from monitorFD on
	r.cmd.Stdout, r.cmd.Stderr = &r.complaint, &r.complaint
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	err = thread.Do(r.cmd.Start)
	theirs.Close()
	if err != nil {
		ours.Close()
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, qmpBudget)
	defer cancel()
	r.monitor, err = qmp.New(ctx, ours, r.note)
	if err == nil {
		err = r.monitor.Do(ctx, "cont")
	}
	if err != nil {
		r.Cut()
		_ = r.cmd.Wait()
		return nil, fmt.Errorf("%w: %s", err, strings.TrimSpace(r.complaint.String()))
	}
	go r.collect()
	return r, nil
}

// makeVariables makes the file of a new machine's variables. An existing one stays as it is.
func makeVariables(path string) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	fresh, err := os.ReadFile(firmwareVariables)
	if err != nil {
		return fmt.Errorf("UEFI (install Debian's package ovmf): %w", err)
	}
	return os.WriteFile(path, fresh, 0o600)
}

// makeDisk makes a sparse file if there is none. An existing disk stays as it is.
func makeDisk(path, image string, size int64) (err error) {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	partial := path + ".partial"
	f, err := os.OpenFile(partial, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if image != "" {
		if err := Unpack(f, image, size); err != nil {
			return err
		}
	}
	if err := f.Truncate(size); err != nil {
		return err
	}
	return os.Rename(partial, path)
}

// Unpack writes the content of a compressed image, without its zeros.
func Unpack(disk *os.File, image string, size int64) error {
	var complaints bytes.Buffer
	cmd := exec.Command("zstd", "-dc", "--sparse", "--", image)
	cmd.Stdout, cmd.Stderr = disk, &complaints
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", cmd, err, bytes.TrimSpace(complaints.Bytes()))
	}
	info, err := disk.Stat()
	if err == nil && info.Size() > size {
		err = fmt.Errorf("it has %d GiB, and the image %s needs more", size>>30, image)
	}
	return err
}

// socketPair returns both ends of a connection. A child process inherits one of them.
func socketPair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	our := os.NewFile(uintptr(fds[0]), "monitor")
	defer our.Close() // FileConn duplicates the descriptor
	theirs = os.NewFile(uintptr(fds[1]), "monitor of the machine")
	if ours, err = net.FileConn(our); err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

// Running is a machine from power-on to power-off.
type Running struct {
	cmd       *exec.Cmd
	monitor   *qmp.Client
	complaint bytes.Buffer  // standard error; complete when done is closed
	reason    string        // of the last SHUTDOWN; complete when the monitor is done
	done      chan struct{} // closed when the two below are set
	end       exit.Reason
	err       error
}

// note is called for each event of QEMU.
func (r *Running) note(event, reason string) {
	if event == "SHUTDOWN" {
		r.reason = reason
	}
}

func (r *Running) collect() {
	defer close(r.done)
	err := r.cmd.Wait()
	<-r.monitor.Done() // the last event has the reason
	r.monitor.Close()
	switch {
	case r.cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled():
		r.end = exit.Killed
	case err != nil:
		r.end, r.err = exit.Failed, fmt.Errorf("%w: %s", err, strings.TrimSpace(r.complaint.String()))
	case r.reason == "guest-reset":
		r.end = exit.Reboot
	case r.reason == "guest-panic":
		r.end = exit.Died
	default:
		r.end = exit.Off
	}
}

// Wait blocks until the machine has ended. Several goroutines may call it.
func (r *Running) Wait() (exit.Reason, error) {
	<-r.done
	return r.end, r.err
}

// PowerOff presses the power button: the node shuts down in order, in its own time.
func (r *Running) PowerOff(ctx context.Context) error {
	// A frozen machine does not react to its power button.
	return errors.Join(r.Freeze(ctx, false), r.monitor.Do(ctx, "system_powerdown"))
}

// Cut ends the machine at once, as a power failure does.
func (r *Running) Cut() { _ = r.cmd.Process.Kill() }

// Interrupt sends a nonmaskable interrupt to all processors.
func (r *Running) Interrupt(ctx context.Context) error { return r.monitor.Do(ctx, "inject-nmi") }

// Freeze stops the machine's processors, or lets them run again.
func (r *Running) Freeze(ctx context.Context, frozen bool) error {
	if frozen {
		return r.monitor.Do(ctx, "stop")
	}
	return r.monitor.Do(ctx, "cont")
}
