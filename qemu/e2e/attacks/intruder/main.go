// Intruder does what a pod can do that has a node's file system mounted: it prepares files for
// PID 1, and calls the machine API behind its gate. It also connects to what only nodes should reach.
//
//	intruder wait
//	intruder aside PATH...           rename PATH to PATH.aside
//	intruder back PATH...            and back
//	intruder link TARGET PATH        put a symbolic link in the place of PATH
//	intruder fifo PATH               put a FIFO there
//	intruder write PATH CONTENT
//	intruder copy PATH...            put this program there
//	intruder read PATH...            print the content of each, or why it can't be read
//	intruder call DIRECTORY          ask each socket in it for the configuration, as an administrator
//	intruder mount PATH...           mount a file system on each, with the file "made"
//	intruder dial HOST:PORT...       connect to each, and print those that accept
//
// Under another name, it is a program that the node runs: it leaves a mark, and fails.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/garboard-os/garboard/api"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
)

const (
	// timeout bounds the call.
	timeout = 3 * time.Second
	// dialTimeout is for all connections together: packets that are dropped are never answered.
	dialTimeout = 3 * time.Second
	// mostRead of a file is printed: a configuration fits.
	mostRead = 64 << 10
)

// mark is the beginning of what is left on a node that runs this program.
const mark = "/var/intruder-was-"

func main() {
	if name := filepath.Base(os.Args[0]); name != "intruder" {
		_ = os.WriteFile(mark+name, nil, 0o600)
		os.Exit(1)
	}
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(verb string, args []string) error {
	switch verb {
	case "wait":
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		<-ctx.Done()
		return nil
	case "aside":
		return each(args, func(path string) error { return os.Rename(path, path+".aside") })
	case "back":
		return each(args, func(path string) error { return os.Rename(path+".aside", path) })
	case "link":
		return place(args[1], func() error { return os.Symlink(args[0], args[1]) })
	case "fifo":
		return place(args[0], func() error { return unix.Mkfifo(args[0], 0o600) })
	case "write":
		return place(args[0], func() error { return os.WriteFile(args[0], []byte(args[1]), 0o600) })
	case "copy":
		own, err := os.ReadFile("/proc/self/exe")
		if err != nil {
			return err
		}
		return each(args, func(path string) error { return place(path, func() error { return os.WriteFile(path, own, 0o755) }) })
	case "mount":
		return each(args, func(path string) error {
			return errors.Join(os.MkdirAll(path, 0o755), unix.Mount("tmpfs", path, "tmpfs", 0, ""), os.WriteFile(filepath.Join(path, "made"), nil, 0o600))
		})
	case "read":
		return each(args, func(path string) error {
			text, err := os.ReadFile(path)
			fmt.Printf("%s: %q, %v\n", path, text[:min(len(text), mostRead)], err)
			return nil
		})
	case "dial":
		dial(args)
		return nil
	case "call":
		return filepath.WalkDir(args[0], func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.Type() != fs.ModeSocket {
				return nil // processes end meanwhile, for example
			}
			answer, err := call(path)
			fmt.Printf("%s: %s %v\n", path, answer, err)
			return nil
		})
	}
	return errors.ErrUnsupported
}

func each(paths []string, do func(path string) error) (err error) {
	for _, path := range paths {
		err = errors.Join(err, do(path))
	}
	return err
}

// place makes what is to be at path, instead of what is there.
func place(path string, make func() error) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return make()
}

func dial(addresses []string) {
	var all sync.WaitGroup
	for _, address := range addresses {
		all.Go(func() {
			if c, err := net.DialTimeout("tcp", address, dialTimeout); err == nil {
				_ = c.Close()
				fmt.Println(address)
			}
		})
	}
	all.Wait()
}

func call(socket string) (string, error) {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Timeout: timeout, Transport: &http.Transport{Protocols: &protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}}
	r, err := http.NewRequest(http.MethodPost, "http://machine"+garboardv1connect.ConfigServiceGetProcedure, strings.NewReader("{}"))
	if err != nil {
		return "", err
	}
	for name, value := range map[string]string{
		"Content-Type": "application/json",
		api.HeaderMode: api.ModeNormal, api.HeaderPeer: "admin", api.HeaderRoles: string(api.Admin), api.HeaderRemote: "10.5.0.1:1",
	} {
		r.Header.Set(name, value)
	}
	answer, err := client.Do(r)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return answer.Status + " " + string(text), err
}
