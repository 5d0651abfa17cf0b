// Package exit is the list of ways in which a node's run ends. Virtual machines and
// containers report the same ones.
package exit

// A Reason is why a node's run ended.
type Reason int

const (
	Off    Reason = iota // powered off by itself, or on request
	Reboot               // the node must be started again
	Killed               // the power was cut
	Died                 // the node's PID 1 or the virtual machine crashed
	Failed               // QEMU or the sandbox could not run the node; see the error
)

func (r Reason) String() string {
	return [...]string{"off", "rebooting", "power cut", "died", "failed"}[r]
}
