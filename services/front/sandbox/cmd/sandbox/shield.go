package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

const shieldCommand = "shield"

// shieldedSettings are settings of the whole host that the kubelet writes. The
// node gets files over them, with the host's value in them at first: the write
// works, is read back, and stays in the node.
var shieldedSettings = []string{
	"vm/overcommit_memory",
	"vm/panic_on_oom",
	"kernel/panic",
	"kernel/panic_on_oops",
	"kernel/keys/root_maxkeys",
	"kernel/keys/root_maxbytes",
}

// ownSettings are the parts of /proc/sys that belong to the node's namespaces;
// they stay writable. All the rest of /proc/sys is the host's, and read-only.
var ownSettings = []string{
	"net",
	"fs/mqueue",
	"kernel/hostname", "kernel/domainname",
	"kernel/msgmax", "kernel/msgmnb", "kernel/msgmni", "kernel/sem",
	"kernel/shmall", "kernel/shmmax", "kernel/shmmni", "kernel/shm_rmid_forced",
}

// readonlyPaths are the other ways from /proc into the host's kernel.
var readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq"}

// maskedPaths read as empty and swallow writes. A node that reboots by
// sysrq-trigger would reboot the host.
var maskedPaths = []string{"/proc/sysrq-trigger"}

// shieldHook calls us again inside the node's mount namespace, when its /proc is
// mounted and its root isn't yet "/": libcontainer itself mounts nothing inside
// /proc.
func shieldHook(root string) configs.Hooks {
	return configs.Hooks{
		configs.CreateContainer: configs.HookList{
			configs.NewCommandHook(&configs.Command{
				Path: "/proc/self/exe",
				Args: []string{"sandbox", shieldCommand, root},
			}),
		},
	}
}

func runShield(args []string) error {
	if len(args) != 1 {
		return errors.New("shield: needs the node's root")
	}
	sys := filepath.Join(args[0], "proc/sys")
	// The files are in the node's /run, which ends with the node.
	files := filepath.Join(args[0], "run", "garboard-shield")
	if err := os.Mkdir(files, 0o755); err != nil {
		return err
	}
	if err := bindMount(sys, sys, unix.MS_RDONLY); err != nil {
		return err
	}
	for _, name := range ownSettings {
		path := filepath.Join(sys, name)
		if err := bindMount(path, path, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, name := range shieldedSettings {
		if err := shieldSetting(filepath.Join(sys, name), filepath.Join(files, filepath.Base(name))); err != nil {
			return fmt.Errorf("shield %s: %w", name, err)
		}
	}
	return nil
}

func shieldSetting(setting, file string) error {
	value, err := os.ReadFile(setting)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // this kernel doesn't have it
	}
	if err != nil {
		return err
	}
	if err := os.WriteFile(file, value, 0o644); err != nil {
		return err
	}
	return bindMount(file, setting, 0)
}

// bindMount binds source on target with exactly these of the per-mount flags;
// what is bound from a read-only mount would be read-only otherwise.
func bindMount(source, target string, flags uintptr) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s on %s: %w", source, target, err)
	}
	if err := unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|quiet|flags, ""); err != nil {
		return fmt.Errorf("remount %s: %w", target, err)
	}
	return nil
}
