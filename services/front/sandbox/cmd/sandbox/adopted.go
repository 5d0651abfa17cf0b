package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const adoptedCommand = "adopted"

const cgroupRoot = "/sys/fs/cgroup"

// runAdopted makes the container of another runtime, such as Docker, what a node expects (nodeConfig), and becomes the
// node's PID 1. The runtime must have given it the capabilities of a node, no filter of system calls, and access to all
// devices.
func runAdopted(args []string) error {
	if len(args) == 0 || os.Getpid() != 1 {
		return errors.New(adoptedCommand + ": must be the first process of a container, and needs the program to become")
	}
	for _, step := range []func() error{makeCgroupsWritable, makeDevices, func() error { return runShield([]string{"/"}) }} {
		if err := step(); err != nil {
			return err
		}
	}
	return fmt.Errorf("become %s: %w", args[0], unix.Exec(args[0], args, os.Environ()))
}

// makeCgroupsWritable is for the kubelet and containerd. Docker mounts cgroups read-only where a container isn't
// privileged, and privileged ones have the devices of the host.
func makeCgroupsWritable() error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(cgroupRoot))
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if err := unix.Mount("", m.Mountpoint, "", unix.MS_REMOUNT|unix.MS_BIND|quiet, ""); err != nil {
			return fmt.Errorf("make %s writable: %w", m.Mountpoint, err)
		}
	}
	return nil
}

func makeDevices() error {
	for _, d := range extraDevices {
		if err := os.MkdirAll(filepath.Dir(d.Path), 0o755); err != nil {
			return err
		}
		err := unix.Mknod(d.Path, unix.S_IFCHR|uint32(d.FileMode.Perm()), int(unix.Mkdev(uint32(d.Major), uint32(d.Minor))))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make %s: %w", d.Path, err)
		}
	}
	return nil
}
