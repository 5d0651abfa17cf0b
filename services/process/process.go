// Package process starts the node's child processes and knows them.
//
// PID 1 inherits every orphan and must reap it, but a bare wait4(-1) loop would
// also take the exit status of children that os/exec waits for. So every child
// is started through Table: its PID is recorded under the lock that is held
// across the start, and the orphan sweep reaps only PIDs that are not recorded.
package process
