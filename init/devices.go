package main

import (
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/garboard-os/garboard/services/system/udev"
)

const (
	watchdogDevices = "/dev/watchdog[0-9]*"
	inputDevices    = "/dev/input/event*"
	inputClass      = "/sys/class/input"

	// include/uapi/linux/input-event-codes.h
	eventKey = 1
	keyPower = 116
)

// watchDevices waits for the devices that PID 1 itself uses, the power button
// and the watchdog. udevd loads their drivers later. The kernel's own watchdog is there from stage 1 on.
func (p *pid1) watchDevices() error {
	events, err := udev.Listen(context.Background())
	if err != nil {
		return err
	}
	p.forever("devices", func() {
		watched := map[string]bool{}
		p.lookForDevices(watched)
		for e := range events {
			switch {
			case e.Action == "remove":
				delete(watched, "/dev/"+e.DevName)
			case e.Lost, e.Action == "add" && e.DevName != "":
				p.lookForDevices(watched)
			}
		}
	})
	return nil
}

func (p *pid1) lookForDevices(watched map[string]bool) {
	watchdogs, _ := filepath.Glob(watchdogDevices) // the pattern is valid
	for _, path := range watchdogs {
		p.watchdog.start(path)
	}
	inputs, _ := filepath.Glob(inputDevices) // the pattern is valid
	for _, path := range inputs {
		if watched[path] {
			continue
		}
		watched[path] = true
		if !hasKey(filepath.Join(inputClass, filepath.Base(path), "device/capabilities/key"), keyPower) {
			continue
		}
		p.forever("power button", func() {
			if err := p.watchButton(path); err != nil {
				p.log.Info("power button", "device", path, "err", err)
			}
		})
	}
}

// watchButton asks for power off each time the button is pressed.
func (p *pid1) watchButton(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	// struct input_event (input.h): a time of two longs, then these.
	const size, typeAt, codeAt, valueAt = 24, 16, 18, 20
	buffer := make([]byte, 64*size)
	for {
		n, err := f.Read(buffer)
		if err != nil {
			return err
		}
		for e := buffer[:n]; len(e) >= size; e = e[size:] {
			pressed := binary.NativeEndian.Uint16(e[typeAt:]) == eventKey &&
				binary.NativeEndian.Uint16(e[codeAt:]) == keyPower &&
				binary.NativeEndian.Uint32(e[valueAt:]) == 1
			if pressed {
				p.press(request{intent: powerOff, why: "power button"})
			}
		}
	}
}

// hasKey reports whether an input device has a key, by the bit map in sysfs:
// words in hexadecimal, the highest first.
func hasKey(path string, key int) bool {
	data, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	const wordBits = strconv.IntSize // the kernel's long
	words := strings.Fields(string(data))
	at := len(words) - 1 - key/wordBits
	if at < 0 {
		return false
	}
	word, err := strconv.ParseUint(words[at], 16, wordBits)
	return err == nil && word>>(key%wordBits)&1 == 1
}
