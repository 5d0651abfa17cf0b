package qemu

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/qemu/qmp"
	"github.com/garboard-os/garboard/qemu/wire"
	"golang.org/x/sys/unix"
)

// qmpBudget is for QEMU to start and answer on a busy machine.
const qmpBudget = 20 * time.Second

// machines runs nodes as virtual machines.
type machines struct {
	*lan
}

func newMachines(l *lan) *machines { return &machines{l} }

// machine is everything that QEMU's command line says about one node.
type machine struct {
	plan Plan
	node Node
	dir  clusterDir
	now  time.Time
}

// Descriptors that QEMU inherits, after the three standard ones.
const (
	monitorFD = 3 // its end of the monitor: a socket without a name can't be left behind
	cableFD   = 4 // the tap that is its end of the cable
)

// diskSerial is how much of a serial number a virtio disk shows (VIRTIO_BLK_ID_BYTES).
const diskSerial = 20

// arguments of QEMU. What the emulated processor lacks: cx16, with which half the boots of
// a 6.12 kernel died of a double fault in QEMU 7.2; and erms and fsrm, which say that one
// instruction clears and copies memory fast (Intel's optimization manual, "Enhanced REP
// MOVSB and STOSB"). Kernel and Go believe it, and it is emulated byte by byte: without
// them, the API answered 190 seconds after power-on instead of 360.
func (m machine) arguments() []string {
	accelerator, cpu := "tcg,thread=multi", "max,cx16=off,erms=off,fsrm=off"
	if m.plan.Accelerator == "kvm" {
		accelerator, cpu = "kvm", "host"
	}
	args := []string{
		"-name", option(m.plan.Name + "/" + m.node.Name),
		"-accel", accelerator, "-cpu", cpu, "-machine", "q35",
		"-smp", strconv.Itoa(m.node.CPUs), "-m", strconv.Itoa(m.node.MemoryMiB),
		"-uuid", machineUUID(m.plan.Name, m.node.Name),
		// A reset ends QEMU, and we start it again: one way for both provisioners.
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-chardev", "file,id=console,append=on,path=" + option(m.dir.console(m.node.Name)),
		"-serial", "chardev:console",
		// The second port gets the boot chart, whole, once per boot.
		"-serial", "file:" + option(m.dir.chart(m.node.Name)),
		"-kernel", m.plan.Boot.Kernel, "-initrd", m.plan.Boot.Initramfs,
		"-append", strings.TrimSpace("console=ttyS0 quiet panic=-1 garboard.chart=/dev/ttyS1 " + m.plan.Boot.Cmdline),
	}
	if m.node.ClockOffset != 0 {
		args = append(args, "-rtc", "base="+m.now.Add(m.node.ClockOffset).UTC().Format("2006-01-02T15:04:05"))
	}
	if !m.plan.Unconfigured {
		args = append(args, "-fw_cfg", "name=opt/dev.garboard/config,file="+option(m.dir.config(m.node.Name)))
	}
	if m.node.DiskGiB >= 0 {
		args = append(args,
			"-drive", "if=none,id=disk,format=raw,discard=unmap,file="+option(m.dir.disk(m.node.Name)),
			"-device", "virtio-blk-pci,drive=disk,serial="+machineUUID(m.plan.Name, m.node.Name)[:diskSerial])
	}
	args = append(args,
		"-netdev", m.network(),
		"-device", "virtio-net-pci,netdev=net,mac="+hardwareAddress(m.plan.Name, m.node.Name).String(),
		"-device", "virtio-rng-pci",
		"-device", "i6300esb", "-action", "watchdog=reset")
	return append(args, monitorArguments()...)
}

func monitorArguments() []string {
	return []string{
		"-chardev", fmt.Sprintf("socket,id=monitor,fd=%d", monitorFD),
		"-mon", "chardev=monitor,mode=control",
		"-S", // wait for us, so that no event is missed
	}
}

func (m machine) network() string {
	if m.plan.Unplugged {
		return "hubport,id=net,hubid=0"
	}
	return fmt.Sprintf("tap,id=net,fd=%d", cableFD)
}

// option escapes text for QEMU's option lists: a comma is written twice.
func option(text string) string { return strings.ReplaceAll(text, ",", ",,") }

// machineUUID is a node's hardware identity: always the same (RFC 9562, version 8:
// bits of our own making).
func machineUUID(cluster, node string) string {
	sum := sha256.Sum256([]byte("garboard machine " + cluster + "/" + node))
	sum[6] = sum[6]&0x0f | 0x80
	sum[8] = sum[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[0:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

func (v *machines) Start(ctx context.Context, n Node) (Running, error) {
	if n.DiskGiB >= 0 {
		if err := makeDisk(v.dir.disk(n.Name), int64(n.DiskGiB)<<30); err != nil {
			return nil, err
		}
	}
	cable, err := v.makeTap(n)
	if err != nil {
		return nil, err
	}
	defer cable.Close() // QEMU has its own: the tap goes with the machine
	m := machine{plan: v.plan, node: n, dir: v.dir, now: time.Now()}
	r, err := launch(ctx, v.thread, m.arguments(), cable)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", n.Name, err)
	}
	return r, nil
}

// makeTap makes a node's cable, from the bridge to QEMU.
func (v *machines) makeTap(n Node) (cable *os.File, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := v.dropLink(n); err != nil {
		return nil, err
	}
	err = v.thread.Do(func() (err error) { cable, err = wire.OpenTap(linkName("node", n)); return err })
	if err != nil {
		return nil, fmt.Errorf("make the link of %s: %w", n.Name, err)
	}
	if err := v.connect(n); err != nil {
		cable.Close()
		return nil, fmt.Errorf("connect %s: %w", n.Name, err)
	}
	return cable, nil
}

// launch starts QEMU, and lets the guest run once its monitor answers.
func launch(ctx context.Context, thread *osthread.Thread, args []string, inherited ...*os.File) (*runningMachine, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("monitor: %w", err)
	}
	r := &runningMachine{done: make(chan struct{})}
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

// Close has nothing to do: machines share only their network.
func (v *machines) Close() error { return nil }

// makeDisk makes a sparse file where none is; the node's data stays.
func makeDisk(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Truncate(size)
}

// socketPair is a connection whose one end a child inherits.
func socketPair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	our := os.NewFile(uintptr(fds[0]), "monitor")
	defer our.Close() // FileConn has its own copy
	theirs = os.NewFile(uintptr(fds[1]), "monitor of the machine")
	if ours, err = net.FileConn(our); err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

type runningMachine struct {
	cmd       *exec.Cmd
	monitor   *qmp.Client
	complaint bytes.Buffer // standard error; complete when done is closed

	mu     sync.Mutex // guards reason
	reason string     // of the last SHUTDOWN

	done chan struct{} // closed when the two below are set
	end  End
	err  error
}

func (r *runningMachine) note(e qmp.Event) {
	if e.Name == "SHUTDOWN" {
		r.mu.Lock()
		r.reason = e.Reason
		r.mu.Unlock()
	}
}

func (r *runningMachine) collect() {
	defer close(r.done)
	err := r.cmd.Wait()
	<-r.monitor.Done() // why it ended is the last that it says
	r.monitor.Close()
	r.mu.Lock()
	reason := r.reason
	r.mu.Unlock()
	switch {
	case r.cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled():
		r.end = EndKilled
	case err != nil:
		r.end, r.err = EndFailed, fmt.Errorf("%w: %s", err, strings.TrimSpace(r.complaint.String()))
	case reason == "guest-reset":
		r.end = EndReboot
	case reason == "guest-panic":
		r.end = EndDied
	default:
		r.end = EndOff
	}
}

func (r *runningMachine) Wait() (End, error) {
	<-r.done
	return r.end, r.err
}

func (r *runningMachine) PowerOff(ctx context.Context) error {
	// A machine that stands still can't see its power button.
	return errors.Join(r.Freeze(ctx, false), r.monitor.Do(ctx, "system_powerdown"))
}

func (r *runningMachine) Cut() { _ = r.cmd.Process.Kill() }

func (r *runningMachine) Freeze(ctx context.Context, frozen bool) error {
	if frozen {
		return r.monitor.Do(ctx, "stop")
	}
	return r.monitor.Do(ctx, "cont")
}
