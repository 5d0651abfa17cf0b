package udev

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/mdlayher/socket"
	"golang.org/x/sys/unix"
)

const (
	// The multicast group of the kernel's own uevents; group 2 is for daemons.
	kernelGroup = 1

	// Size of the queue of unread events, in bytes: a machine with hundreds of
	// devices sends some thousand events of 500 bytes within a second of its boot.
	listenBuffer = 8 << 20

	// The kernel's own limit of one event (UEVENT_BUFFER_SIZE) is 2 KiB.
	maxUevent = 8 << 10
)

// Uevent is the kernel's message when a device is added, removed or changed;
// see lib/kobject_uevent.c in its source.
type Uevent struct {
	Action    string // add, remove, change, bind, …
	DevPath   string // below /sys
	Subsystem string
	DevName   string // below /dev, if the device has a node
	Modalias  string
	Seq       uint64
	// Lost: events were dropped before this one. All other fields are empty then,
	// and the reader has to look for devices itself.
	Lost bool
}

// Listen sends the kernel's uevents to the channel from now on until ctx ends;
// then it closes the channel.
func Listen(ctx context.Context) (<-chan Uevent, error) {
	s, err := socket.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM, unix.NETLINK_KOBJECT_UEVENT, "uevents", nil)
	if err != nil {
		return nil, fmt.Errorf("listen for uevents: %w", err)
	}
	// Without the privilege to exceed net.core.rmem_max, the buffer stays small; after lost
	// events the reader looks for devices again.
	_ = s.SetReadBuffer(listenBuffer)
	if err := s.Bind(&unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelGroup}); err != nil {
		return nil, errors.Join(fmt.Errorf("listen for uevents: %w", err), s.Close())
	}

	events := make(chan Uevent)
	go func() {
		defer close(events)
		defer s.Close()
		buffer := make([]byte, maxUevent)
		for {
			n, from, err := s.Recvfrom(ctx, buffer, 0)
			event, ok := Uevent{Lost: true}, errors.Is(err, unix.ENOBUFS)
			if err != nil && !ok {
				return
			}
			// Any process may send to the group: the kernel's port is 0.
			if addr, is := from.(*unix.SockaddrNetlink); err == nil && is && addr.Pid == 0 {
				event, ok = parseUevent(buffer[:n])
			}
			if !ok {
				continue
			}
			select {
			case events <- event:
			case <-ctx.Done():
				return
			}
		}
	}()
	return events, nil
}

// parseUevent reads "add@/devices/…\0KEY=value\0…".
func parseUevent(data []byte) (event Uevent, ok bool) {
	head, text, _ := strings.Cut(string(data), "\x00")
	of := properties(text, "\x00")
	event = Uevent{
		Action: of["ACTION"], DevPath: of["DEVPATH"], Subsystem: of["SUBSYSTEM"], DevName: strings.TrimPrefix(of["DEVNAME"], "/dev/"),
		Modalias: of["MODALIAS"],
	}
	event.Seq, _ = strconv.ParseUint(of["SEQNUM"], 10, 64)
	return event, strings.Contains(head, "@") && event.Action != "" && event.DevPath != ""
}

// properties are a device's, as the kernel says them: KEY=value, and then end.
func properties(text, end string) map[string]string {
	all := map[string]string{}
	for part := range strings.SplitSeq(text, end) {
		key, value, _ := strings.Cut(part, "=")
		all[key] = value
	}
	return all
}
