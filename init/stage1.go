package main

import (
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"

	"github.com/u-root/u-root/pkg/mount"
	"github.com/u-root/u-root/pkg/mount/loop"
	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/system/udev"
)

const (
	rootImage = "/rootfs.sqsh" // the root filesystem, in the initramfs
	firstInit = "/init"        // this program, in the initramfs
	newRoot   = "/newroot"     // where stage 1 mounts it
	self      = "/sbin/init"   // this program again, in it
	extraDir  = "/.extra"      // of systemd-stub(7)
)

// rootModules are needed to mount the root filesystem. A kernel has them built
// in, or the initramfs has them.
var rootModules = []string{
	"loop",     // the image is a file
	"squashfs", // its format
	"overlay",  // the writable /etc on top, before udevd is there
}

// inInitramfs reports whether this is stage 1: only there the image is in the root.
func inInitramfs() bool {
	_, err := os.Stat(rootImage)
	return err == nil
}

// stage1 doesn't return: it becomes stage 2, or gives up.
func stage1() {
	// u-root logs its steps to the global logger; ours are logged below.
	log.SetOutput(io.Discard)
	console := logs.New(os.Stderr)
	for _, s := range []step{
		{"mount the kernel's filesystems", func() error { return mountAll(earlyMounts, nil) }},
		{"open the kernel's log", func() (err error) { console, err = kernelConsole(); return err }},
		{"load modules for the root filesystem", loadRootModules},
		{"mount the root filesystem " + rootImage, mountRoot},
		{"arm the kernel's watchdog", func() error {
			if err := armSoftdog(); err != nil {
				console.Printf("a system that hangs in its first minutes isn't reset: %v", err)
			}
			return nil
		}},
		{"bind PID 1 into it", bindSelf},
		{"keep the signatures of this system", func() error { keepSignatures(console); return nil }},
		{"switch to the root filesystem", func() error { return mount.SwitchRoot(newRoot, self) }},
	} {
		if err := s.run(); err != nil {
			giveUp(console, err)
		}
	}
}

// step is one step of the boot, with the name that its error has.
type step struct {
	what string
	do   func() error
}

// run turns a panic in a step into its error.
func (s step) run() error {
	if err := dag.Guard(slog.New(slog.DiscardHandler), s.do); err != nil {
		return fmt.Errorf("%s: %w", s.what, err)
	}
	return nil
}

// kernelConsole is a console on the kernel's log that shows our lines.
func kernelConsole() (*logs.Logs, error) {
	kmsg, err := logs.OpenKmsg(logs.KmsgDevice)
	if err != nil {
		return nil, err
	}
	// Otherwise the kernel drops all but ten of our lines in five seconds.
	if err := os.WriteFile("/proc/sys/kernel/printk_devkmsg", []byte("on\n"), 0); err != nil {
		return nil, fmt.Errorf("lift the kernel log's rate limit: %w", err)
	}
	return logs.New(kmsg), showNotices()
}

// showNotices raises the kernel's console log level so that our lines are shown
// (`quiet` lowers it further). A higher level, set by loglevel=, stays.
func showNotices() error {
	const setConsoleLevel = 8 // SYSLOG_ACTION_CONSOLE_LEVEL, syslog(2)
	var level int
	data, err := os.ReadFile("/proc/sys/kernel/printk")
	if err == nil {
		_, err = fmt.Sscan(string(data), &level)
	}
	if err != nil {
		return fmt.Errorf("read the console log level: %w", err)
	}
	if level >= logs.ConsoleLogLevel {
		return nil
	}
	// The level is passed as the length of a buffer that the kernel doesn't read.
	if _, err := unix.Klogctl(setConsoleLevel, make([]byte, logs.ConsoleLogLevel)); err != nil {
		return fmt.Errorf("set the console log level: %w", err)
	}
	return nil
}

// loadRootModules skips modules that are neither built in nor in the initramfs:
// if one is needed, the mount fails and reports it. (The initramfs has no list
// of built-in modules.)
func loadRootModules() error {
	modules, err := udev.RunningModules("/")
	if err != nil {
		return boot.IgnoreMissing(err)
	}
	for _, name := range rootModules {
		if err := modules.Load(name); err != nil && !errors.Is(err, udev.ErrNoModule) {
			return err
		}
	}
	return nil
}

// mountRoot attaches the image to a loop device, read-only, which is detached when
// its mount ends. The device keeps the image's pages after its name is deleted.
func mountRoot() error {
	device, err := loop.FindDevice()
	if err != nil {
		return fmt.Errorf("find a loop device: %w", err)
	}
	image, err := os.Open(rootImage)
	if err != nil {
		return err
	}
	defer image.Close()
	dev, err := os.Open(device)
	if err != nil {
		return err
	}
	// Open until it is mounted: an unused device would detach by itself.
	defer dev.Close()
	config := unix.LoopConfig{
		Fd:   uint32(image.Fd()),
		Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR},
	}
	if err := unix.IoctlLoopConfigure(int(dev.Fd()), &config); err != nil {
		return fmt.Errorf("attach %s to %s: %w", rootImage, device, err)
	}
	if err := os.Mkdir(newRoot, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(device, newRoot, "squashfs", unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("mount %s as squashfs: %w", device, err)
	}
	return nil
}

// keepSignatures copies what the boot loader's stub has put into the initramfs, which ends with it. Without that, keys
// of the TPM don't open the disk.
func keepSignatures(console *logs.Logs) {
	if _, err := os.Stat(extraDir); errors.Is(err, os.ErrNotExist) {
		return // the system isn't signed
	}
	if err := os.CopyFS(boot.SignaturesDir, os.DirFS(extraDir)); err != nil {
		console.Printf("the TPM will give no keys: %v", err)
	}
}

// bindSelf mounts this program, read-only, over an empty file in the root
// filesystem.
//
// The switch of the root deletes everything in the initramfs, and a file
// without a name can't be bound again, into a sandbox. A mount point can't be
// deleted (unlink(2), EBUSY), so the program is first bound over itself. It
// needs no more memory: its pages stay in any case.
func bindSelf() error {
	if err := unix.Mount(firstInit, firstInit, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s to itself: %w", firstInit, err)
	}
	place := newRoot + self
	if err := unix.Mount(firstInit, place, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s to %s: %w", firstInit, place, err)
	}
	const flags = unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV
	if err := unix.Mount("", place, "", flags, ""); err != nil {
		return fmt.Errorf("make %s read-only: %w", place, err)
	}
	return nil
}
