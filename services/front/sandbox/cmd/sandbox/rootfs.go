package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// loopTries bounds the race for a free loop device: another process may take the
// one that the kernel has returned as free.
const loopTries = 32

// mountRootfs puts the node's root filesystem, read-only, on dir: an image
// through a loop device, a directory as a bind.
func mountRootfs(source, dir string) error {
	info, err := os.Stat(source)
	if err != nil {
		return fmt.Errorf("root filesystem: %w", err)
	}
	if info.IsDir() {
		if err := unix.Mount(source, dir, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s on %s: %w", source, dir, err)
		}
		if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
			return fmt.Errorf("make %s read-only: %w", dir, err)
		}
		return nil
	}
	loop, err := attachLoop(source)
	if err != nil {
		return err
	}
	// Autoclear frees the device at the last close: at the end of the mount from
	// here on.
	defer loop.Close()
	if err := unix.Mount(loop.Name(), dir, "squashfs", unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("mount squashfs %s: %w", source, err)
	}
	return nil
}

// attachLoop puts a loop device before a file.
func attachLoop(path string) (*os.File, error) {
	image, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("root filesystem: %w", err)
	}
	defer image.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("loop device: %w", err)
	}
	defer control.Close()
	config := unix.LoopConfig{
		Fd:   uint32(image.Fd()),
		Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR},
	}
	// losetup shows the path to a person.
	copy(config.Info.File_name[:len(config.Info.File_name)-1], path)
	for range loopTries {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		loop, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("open a loop device: %w", err)
		}
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &config)
		if err == nil {
			return loop, nil
		}
		loop.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("attach %s to %s: %w", path, loop.Name(), err)
		}
	}
	return nil, fmt.Errorf("attach %s: every one of %d loop devices was taken meanwhile", path, loopTries)
}

// workMounts makes the mounts of this process private, and work an empty tmpfs. It returns the
// directories in it for the root of what is started, and for libcontainer's state.
func workMounts(work string, flags uintptr, options string, mode os.FileMode) (root, state string, err error) {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return "", "", fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("sandbox", work, "tmpfs", flags, options); err != nil {
		return "", "", fmt.Errorf("mount tmpfs on %s: %w", work, err)
	}
	root, state = filepath.Join(work, "root"), filepath.Join(work, "state")
	return root, state, errors.Join(os.Mkdir(root, mode), os.Mkdir(state, mode))
}
