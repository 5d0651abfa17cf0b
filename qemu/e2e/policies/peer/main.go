// Peer is both ends of a connection between pods.
//
//	peer serve                        accept on ports 8080 and 8081, until SIGTERM
//	peer reach HOST:PORT|NAME...      connect to each, or look its name up, and print those where that works
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// timeout is for all together: packets that are dropped are never answered.
const timeout = 5 * time.Second

func main() {
	if os.Args[1] != "serve" {
		reach(os.Args[2:])
		return
	}
	if err := serve(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve() (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	for _, port := range []string{"8080", "8081"} {
		l, failed := net.Listen("tcp", ":"+port)
		if failed != nil {
			return failed
		}
		defer func() { err = errors.Join(err, l.Close()) }()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return // closed
				}
				_ = c.Close()
			}
		}()
	}
	<-ctx.Done()
	return nil
}

func reach(targets []string) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	errs := make([]error, len(targets))
	var all sync.WaitGroup
	for i, target := range targets {
		all.Go(func() {
			if _, _, err := net.SplitHostPort(target); err != nil {
				_, errs[i] = net.DefaultResolver.LookupHost(ctx, target)
				return
			}
			c, err := (&net.Dialer{}).DialContext(ctx, "tcp", target)
			if errs[i] = err; err == nil {
				_ = c.Close()
			}
		})
	}
	all.Wait()
	for i, target := range targets {
		if errs[i] == nil {
			fmt.Println(target)
		}
	}
}
