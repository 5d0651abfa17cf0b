# The guest that probe.go runs to see whether KVM really runs guests. probe.bin is
# this, built with: as -o probe.o probe.asm && objcopy -O binary -j .text probe.o probe.bin
#
# It lies at the start of a 64 KiB ROM just below 4 GiB and is entered from the reset
# vector in 16-bit mode. It goes up to 64-bit mode, because hosts exist where KVM
# emulates 16-bit code instruction by instruction and hangs after that; it counts,
# so that emulation is too slow to pass; it writes memory; then it tells QEMU to end.
	.set	rom, 0xffff0000
	.code16
start:
	cli
	lgdtl	%cs:(gdtr - start)
	movl	%cr0, %eax
	orb	$1, %al
	movl	%eax, %cr0
	ljmpl	$8, $rom + (protected - start)
	.code32
protected:
	movw	$16, %ax
	movw	%ax, %ds
	movw	%ax, %es
	movw	%ax, %ss
	movl	$0x8000, %esp
	# Page tables: the first 2 MiB, and the 2 MiB that this ROM ends.
	movl	$0x2003, 0x1000
	movl	$0x3003, 0x2000
	movl	$0x4003, 0x2018
	movl	$0x00000083, 0x3000
	movl	$0xffe00083, 0x4ff8
	movl	%cr4, %eax
	orl	$0x20, %eax
	movl	%eax, %cr4
	movl	$0x1000, %eax
	movl	%eax, %cr3
	movl	$0xc0000080, %ecx
	rdmsr
	orl	$0x100, %eax
	wrmsr
	movl	%cr0, %eax
	orl	$0x80000000, %eax
	movl	%eax, %cr0
	ljmp	$24, $rom + (long - start)
	.code64
long:
	movl	$50000000, %ecx		# 25 ms at native speed, a minute when emulated
1:	decl	%ecx
	jnz	1b
	movl	$0x100000, %edi		# 512 KiB of memory
	movl	$0x10000, %ecx
	movq	$0x5a5a5a5a, %rax
	cld
	rep stosq
	cpuid				# leaves the guest once
	movb	$0x10, %al		# isa-debug-exit: QEMU exits with 0x10 * 2 + 1
	outb	%al, $0xf4
2:	hlt
	jmp	2b
	.balign	8
gdt:
	.quad	0
	.quad	0x00cf9a000000ffff
	.quad	0x00cf92000000ffff
	.quad	0x00af9a000000ffff
gdtr:
	.word	. - gdt - 1
	.long	rom + (gdt - start)
