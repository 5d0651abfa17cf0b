package configuration

// State is how far the disks are with STATE, where an installed node has its configuration.
type State int

const (
	StateAbsent State = iota // no disk has one that is to be used
	StateLate                // the disk or the TPM of this boot isn't there yet
	StateBroken              // it can't be mounted, or nobody knows which of several it is
	StateLocked              // it is encrypted, and no key of this machine opens it
	StateWiping              // a reset is to wipe other disks before it, which aren't there yet
	StateMounted
)

// stateText is what the node can do with the configuration on STATE.
type stateText int

const (
	textAbsent stateText = iota // or it is used
	textBroken                  // neither it nor its history has one that this release can use
	textLost                    // the disk can't read it, and the history has no other one
)

// facts are what a node knows that has no configuration which it can use.
type facts struct {
	installed bool // this system was started from the disk on which it was installed
	state     State
	unsettled bool // what the last boot left undone on STATE can't be done
	text      stateText
	trial     bool // this system is on trial: another one takes its place, and isn't going back to this one
	elsewhere bool // another source has a configuration, or can't be asked for one
	had       bool // STATE says that the node has had one, which may not be kept there (persist: false)
}

// mayOpenMaintenance is the rule for maintenance mode, in which anybody may give the node its configuration: a node
// that has one, and can't have it now, isn't given another. closed is why it isn't opened.
func mayOpenMaintenance(f facts) (open bool, closed string) {
	switch {
	case f.state == StateLate:
		return false, "the disk or the TPM of this boot may still come"
	case f.installed && f.state == StateBroken:
		return false, "this system is installed, so its disk has a configuration"
	case f.state == StateLocked:
		return false, "STATE has a configuration that its recovery key opens"
	case f.state == StateWiping:
		return false, "a reset goes on first"
	case f.unsettled || f.text == textLost:
		return false, "STATE has a configuration that can't be read now"
	case f.text == textBroken && f.trial:
		return false, "the former system can read the configuration"
	case f.elsewhere && f.had:
		return false, "the node has had a configuration, and its source may give it again"
	}
	return true, ""
}
