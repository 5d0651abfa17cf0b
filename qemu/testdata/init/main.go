// Command init is a minimal PID 1 of a container node, for tests: it counts its
// boots on STATE, sets its address, reaches the registry, and executes commands
// on the port of the Kubernetes API.
package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "sleep" {
		select {}
	}
	if err := run(); err != nil {
		fmt.Println("init:", err)
		os.Exit(1)
	}
}

func run() error {
	const counter = "/system/state/boots"
	boots, _ := os.ReadFile(counter)
	boots = append(boots, '+')
	if err := os.WriteFile(counter, boots, 0o644); err != nil {
		return err
	}
	seed, err := os.ReadFile("/run/garboard-seed/config.yaml")
	if err != nil {
		return err
	}
	if err := network(string(seed)); err != nil {
		return err
	}
	// Pods have cgroups and processes of their own, which must end with the node.
	for _, dir := range []string{"/sys/fs/cgroup/memory/kubepods/pod1", "/sys/fs/cgroup/kubepods/pod1"} {
		_ = os.MkdirAll(dir, 0o755)
	}
	if err := exec.Command("/sbin/init", "sleep").Start(); err != nil {
		return err
	}
	fmt.Printf("boot %d of %s with %v\n", len(boots), hostname(), os.Args)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		if _, err := os.Stat("/run/stay"); err == nil {
			fmt.Println("pressed once")
			<-stop
		}
		fmt.Println("powering off")
		_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	}()
	return serve(len(boots))
}

func hostname() string {
	name, _ := os.Hostname()
	return name
}

func network(seed string) error {
	_, rest, _ := strings.Cut(seed, "cidr: ")
	cidr, _, _ := strings.Cut(rest, "\n")
	link, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	address, err := netlink.ParseAddr(strings.Trim(cidr, `"' `))
	if err != nil {
		return fmt.Errorf("address %q: %w", cidr, err)
	}
	if err := netlink.AddrAdd(link, address); err != nil {
		return err
	}
	return netlink.LinkSetUp(link)
}

func serve(boots int) error {
	l, err := net.Listen("tcp", ":6443")
	if err != nil {
		return err
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			line, _ := bufio.NewReader(conn).ReadString('\n')
			fmt.Fprintln(conn, answer(strings.Fields(line), boots))
		}()
	}
}

// ask asks another node for its name, and returns how long that took.
func ask(address string) string {
	start := time.Now()
	conn, err := net.DialTimeout("tcp", address+":6443", time.Second)
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
	fmt.Fprintln(conn, "who")
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%s after %d ms", strings.TrimSpace(line), time.Since(start).Milliseconds())
}

func answer(words []string, boots int) string {
	switch {
	case len(words) == 1 && words[0] == "who":
		return fmt.Sprintf("%s boot %d", hostname(), boots)
	case len(words) == 2 && words[0] == "get":
		resp, err := http.Get(words[1])
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return resp.Status + " " + string(body)
	case len(words) == 2 && words[0] == "ask":
		return ask(words[1])
	case len(words) == 3 && words[0] == "write":
		if err := os.WriteFile(words[1], []byte(words[2]), 0o644); err != nil {
			return err.Error()
		}
		text, err := os.ReadFile(words[1])
		return fmt.Sprintf("%s %v", strings.TrimSpace(string(text)), err)
	case len(words) == 2 && words[0] == "allocate":
		size, err := strconv.Atoi(words[1])
		if err != nil {
			return err.Error()
		}
		memory := make([]byte, size<<20)
		for i := range memory {
			memory[i] = 1
		}
		return fmt.Sprintf("%d MiB", len(memory)>>20)
	case len(words) == 1 && words[0] == "reboot":
		_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART)
	}
	return "what?"
}
